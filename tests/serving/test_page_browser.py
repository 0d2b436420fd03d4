"""The page in a real browser: by mouse, by keyboard, on a phone, and with names that mean harm."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from selfmask.data import open_images
from selfmask.serving import building
from selfmask.serving.collection import Collection

from .indexed import IMAGES, indexed, save_run
from .served import BACKBONE, KEY, photo, save_mask, served

pytestmark = pytest.mark.heavy
EVIL = "<img src=x onerror=alert(1)>"
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program is not None, "Chromium is missing: run .ci/browser, or install your system's package `chromium`"
    with sync_playwright() as playwright:
        # Without a sandbox, which the root of a container cannot have: it shows pages of ours alone.
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    runs = [save_run(folder / f"masks/{name}", seed, off) for name, seed, off in (("birds", 1, 0.3), ("cats", 2, 0.1))]
    save_mask(folder / "masks/other.smn", seed=3)
    (folder / "photo.png").write_bytes(photo(1234))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "POINTS", 60)
        indexed(folder / "clothes.index", *runs)
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    with Collection.open(place / "clothes.index") as collection, served(place / "masks", collection) as (client, _):
        yield str(client.base_url)


@contextmanager
def page_at(browser: Browser, address: str, **how: Any) -> Iterator[Page]:
    """The page, ready; nothing may go wrong in it, and nothing may be asked of anybody but its server."""
    context = browser.new_context(**how)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: None if _is_own(request.url, address) else wrong.append(request.url))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    try:
        yield page
    finally:
        context.close()
    assert wrong == []


def _is_own(url: str, address: str) -> bool:
    return url.startswith((address.rstrip("/") + "/", "data:", "blob:"))


def check_images(page: Page) -> None:
    """Those that were asked for have come; those far below are asked for when they are scrolled to."""
    for image in page.locator("#frozen img").all()[:6]:
        image.scroll_into_view_if_needed()
        expect(image).to_have_js_property("complete", True)
        expect(image).not_to_have_js_property("naturalWidth", 0)


def names_in(page: Page, side: str) -> list[str]:
    return [str(each.get_attribute("title")) for each in page.locator(f"#{side} button").all()]


def test_an_image_is_picked_and_a_mask_chosen(browser: Browser, address: str, place: Path) -> None:
    with page_at(browser, address) as page:
        assert page.locator("#masks tr").count() == 4
        expect(page.locator("#about")).to_contain_text(f"{IMAGES} images")
        page.get_by_label("Choose an image").set_input_files(place / "photo.png")
        expect(page.get_by_role("status")).to_contain_text(f"Nearest of {IMAGES} images")
        assert page.locator("#frozen img").count() == page.locator("#mask img").count() == 12
        expect(page.locator("#mask-title")).to_have_text("Mask birds")
        first = names_in(page, "mask")
        frozen = names_in(page, "frozen")
        only = page.locator("#mask li.only").count()
        assert only == len(set(first) - set(frozen))
        page.get_by_label("Mask", exact=True).select_option("cats")
        expect(page.locator("#mask-title")).to_have_text("Mask cats")
        assert names_in(page, "mask") != first
        assert names_in(page, "frozen") == frozen
        page.get_by_label("Images to find").select_option("6")
        expect(page.locator("#mask li")).to_have_count(6)
        page.get_by_label("Mask", exact=True).select_option("other")
        expect(page.locator("#mask-note")).to_contain_text("no vectors of other")
        expect(page.locator("#mask li")).to_have_count(0)
        page.wait_for_load_state("networkidle")
        check_images(page)


def test_an_image_is_dropped_and_pasted(browser: Browser, address: str, place: Path) -> None:
    data = base64.b64encode((place / "photo.png").read_bytes()).decode()
    put = """([data, kind]) => {
        const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
        const files = new DataTransfer();
        files.items.add(new File([bytes], "photo.png", { type: "image/png" }));
        const how = { dataTransfer: files, bubbles: true, cancelable: true };
        if (kind === "drop") document.getElementById("drop").dispatchEvent(new DragEvent("drop", how));
        else window.dispatchEvent(new ClipboardEvent("paste", { clipboardData: files }));
    }"""
    for kind in ("drop", "paste"):
        with page_at(browser, address) as page:
            page.evaluate(put, [data, kind])
            expect(page.locator("#frozen li")).to_have_count(12)


def test_a_file_that_is_no_image_is_said_so(browser: Browser, address: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "broken.png").write_bytes(photo(1)[:200])
    with page_at(browser, address) as page:
        page.get_by_label("Choose an image").set_input_files(tmp_path / "notes.txt")
        expect(page.locator("#status.wrong")).to_contain_text("not an image")
    context = browser.new_context()
    page = context.new_page()  # a refused request is an error in the console
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    page.locator("#file").set_input_files(tmp_path / "broken.png")
    expect(page.locator("#status.wrong")).to_contain_text("cannot read")
    context.close()


def test_what_the_server_does_not_read_is_redrawn(browser: Browser, address: str, tmp_path: Path) -> None:
    """SVG, say, or a photo that is too large to be sent as it is."""
    (tmp_path / "drawing.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"><rect width="40" height="64" fill="red"/></svg>'
    )
    with page_at(browser, address) as page:
        page.get_by_label("Choose an image").set_input_files(tmp_path / "drawing.svg")
        expect(page.locator("#status")).to_contain_text("Nearest of", timeout=10_000)


def test_all_is_done_by_keyboard(browser: Browser, address: str, place: Path) -> None:
    with page_at(browser, address) as page:
        page.on("filechooser", lambda chooser: chooser.set_files(place / "photo.png"))
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the nearest images")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator("#file")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#frozen li")).to_have_count(12)
        page.keyboard.press("Tab")
        expect(page.locator("#model")).to_be_focused()
        before = page.locator("#model").input_value()
        page.keyboard.press("ArrowDown")
        expect(page.locator("#model")).not_to_have_value(before)
        expect(page.locator("#mask-title")).to_have_text(f"Mask {page.locator('#model').input_value()}")
        page.keyboard.press("Tab")
        expect(page.locator("#count")).to_be_focused()
        page.keyboard.press("Tab")
        first = page.locator("#frozen button").first
        expect(first).to_be_focused()
        wanted = str(first.get_attribute("title"))
        page.keyboard.press("Enter")
        expect(page.locator("#photo")).to_have_attribute("alt", re.compile(re.escape(wanted) + "$"))
        expect(page.locator("#results")).to_be_focused()
        page.locator("#plane").focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
            page.keyboard.press(key)
        expect(page.locator("#plane circle.at")).to_have_count(1)
        expect(page.locator("#peek:not([aria-busy])")).to_have_count(1)
        expect(page.locator("#peek figcaption")).not_to_be_empty()
        peeked = page.locator("#peek figcaption").inner_text()
        page.keyboard.press("Enter")
        expect(page.locator("#photo")).to_have_attribute("alt", peeked)


def test_who_goes_on_while_a_search_runs_is_not_called_back(browser: Browser, address: str) -> None:
    with page_at(browser, address) as page:
        waiting = list[Route]()
        page.route("**/v1/search", lambda route: waiting.append(route))
        page.locator("#plane circle").nth(7).click(force=True)
        expect(page.locator("#results")).to_have_attribute("aria-busy", "true")
        page.locator("#count").focus()
        waiting[0].continue_()
        expect(page.locator("#frozen li")).to_have_count(12)
        expect(page.get_by_role("status")).to_contain_text("Nearest of")
        expect(page.locator("#count")).to_be_focused()
        page.unroute("**/v1/search")


def test_points_of_the_plane_are_clicked(browser: Browser, address: str) -> None:
    with page_at(browser, address) as page:
        expect(page.locator("#plane circle")).to_have_count(60)
        expect(page.locator("#classes li")).to_have_count(10)
        place = page.locator("#plane circle").first.get_attribute("cx")
        assert place is not None
        page.locator("#plane circle").nth(7).click(force=True)
        expect(page.locator("#frozen li")).to_have_count(12)
        expect(page.locator("#photo")).to_be_visible()
        page.get_by_label("Vectors of").select_option(label="birds")
        expect(page.locator("#plane circle")).to_have_count(60)
        expect(page.locator("#plane circle").first).not_to_have_attribute("cx", place)


def test_it_fits_a_phone(browser: Browser, address: str, place: Path) -> None:
    with page_at(browser, address, **PHONE) as page:
        page.locator("#file").set_input_files(place / "photo.png")
        expect(page.locator("#mask li")).to_have_count(12)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        sides = [page.locator(f"#{side}").bounding_box() for side in ("frozen", "mask")]
        assert sides[0] is not None
        assert sides[1] is not None
        assert abs(sides[0]["y"] - sides[1]["y"]) < 2  # side by side
        for control in ("#model", "#count", "#space"):
            box = page.locator(control).bounding_box()
            assert box is not None
            assert box["height"] >= 44  # for fingers
        page.locator("#plane").scroll_into_view_if_needed()
        box = page.locator("#plane circle").nth(3).bounding_box()
        assert box is not None
        page.touchscreen.tap(box["x"] + 8, box["y"] + 8)  # not quite on it
        expect(page.locator("#photo")).to_have_attribute("src", re.compile("v1/collection/thumbnails/"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read(browser: Browser, address: str, scheme: Any) -> None:
    """Contrast of all colours of text against the page: 4.5 at least, as WCAG AA asks."""
    with page_at(browser, address, color_scheme=scheme) as page:
        names = ("page", "ink", "soft", "accent", "warn")
        colours = page.evaluate(
            "(names) => names.map((name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name))",
            list(names),
        )
    ground, *others = map(luminance, colours)
    for name, other in zip(names[1:], others, strict=True):
        light, dark = max(ground, other), min(ground, other)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, name


def luminance(colour: str) -> float:
    channels = [int(colour.strip()[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_names_that_mean_harm_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    images = open_images("selfmask/fashion")
    for number in range(12):
        file = tmp_path / "photos" / (EVIL, "</script><b>x</b>")[number % 2] / f"{number}{EVIL}'\".png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number].permute(1, 2, 0).numpy()).save(file)
    indexed(tmp_path / "c", BACKBONE, images=open_images(tmp_path / "photos"))
    (tmp_path / "masks").mkdir()
    with (
        Collection.open(tmp_path / "c") as collection,
        served(tmp_path / "masks", collection) as (client, _),
        page_at(browser, str(client.base_url)) as page,
    ):
        page.locator("#plane circle").nth(2).click(force=True)
        expect(page.locator("#frozen li")).to_have_count(11)
        page.locator("#frozen button").first.click()
        page.wait_for_load_state("networkidle")
        assert EVIL in str(page.locator("#photo").get_attribute("alt"))
        assert page.locator("main b b, main script, img[src=x]").count() == 0


def test_a_key_is_asked_for_by_the_browser(browser: Browser, place: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    with (
        Collection.open(place / "clothes.index") as collection,
        served(place / "masks", collection, api_key_file=str(tmp_path / "keys")) as (client, _),
    ):
        credentials = {"username": "me", "password": KEY}
        with page_at(browser, str(client.base_url), http_credentials=credentials) as page:
            page.locator("#file").set_input_files(place / "photo.png")
            expect(page.locator("#mask li")).to_have_count(12)
            page.wait_for_load_state("networkidle")
            check_images(page)


def test_without_a_collection_the_masks_are_listed(browser: Browser, place: Path) -> None:
    with served(place / "masks") as (client, _):
        context = browser.new_context()
        page = context.new_page()
        page.goto(str(client.base_url))
        expect(page.locator("#masks tr")).to_have_count(4)
        expect(page.locator("#drop-text")).to_contain_text("--index")
        expect(page.locator("#file")).to_be_disabled()
        context.close()
