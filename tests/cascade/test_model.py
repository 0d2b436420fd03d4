"""A cascade as a library user meets it: two passes an image, one file, the same bits after loading."""

from __future__ import annotations

import copy
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from selfmask import Cascade
from selfmask.cascade.file import inspect_cascade, is_cascade
from selfmask.cascade.model import CONDITIONAL, DISPATCHER, UNCONDITIONAL, expert_name
from selfmask.data import Images, SomeImages
from selfmask.embedding.embedder import FROZEN, Embedder
from selfmask.errors import (
    BadImageError,
    ConfigError,
    CorruptCascadeError,
    MaskFileError,
    NotAMaskFileError,
    SelfmaskError,
    UnsupportedVersionError,
    WrongBaseError,
)
from selfmask.maskfile.container import content_hash
from tests.training.small import network

from .small import EXPERTS, WIDTH, clothes, features, fitted, pixels

SIDES = [FROZEN, DISPATCHER, CONDITIONAL, UNCONDITIONAL]


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Cascade:
    return fitted(tmp_path_factory.mktemp("masks"))


@pytest.fixture(scope="module")
def file(cascade: Cascade, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "cascade.smn"
    assert cascade.save(path) == path.stat().st_size
    return path


class Passes:
    """Counts the images that pass a network."""

    def __init__(self, base: nn.Module) -> None:
        self.images: list[int] = []
        base.register_forward_pre_hook(lambda _, inputs: self.images.append(len(inputs[0])))


def test_conditional_is_two_passes_and_unconditional_one_for_each_network(cascade: Cascade) -> None:
    cascade = copy.deepcopy(cascade)
    passes, images = Passes(cascade.masked.base), pixels(40)
    with torch.no_grad():
        cascade(images)
        assert passes.images[0] == 40
        assert sum(passes.images[1:]) == 40  # grouped: each image once more
        assert len(passes.images) == 1 + len(set(cascade.route(clothes(40)).tolist())) > 2
        passes.images.clear()
        cascade.combination = UNCONDITIONAL
        cascade(images)
        assert passes.images == [40] * (EXPERTS + 1)
        passes.images.clear()
        cascade.vectors(images, SIDES)
        assert passes.images == [40] * (EXPERTS + 2)


def test_sides_are_what_each_network_says(cascade: Cascade) -> None:
    images = pixels(30)
    with torch.no_grad():
        frozen, dispatcher, conditional, unconditional = cascade.vectors(images, SIDES)
        assert torch.equal(frozen, network().eval()(images))
        assert torch.equal(dispatcher, features(cascade.masked, images, DISPATCHER))
        torch.testing.assert_close(conditional, cascade(images))  # groups are smaller batches, which may round
        assert torch.equal(unconditional, cascade.vectors(images, [UNCONDITIONAL])[0])
    assert not torch.allclose(conditional, unconditional)


def test_images_go_to_the_expert_that_the_router_chooses(cascade: Cascade) -> None:
    route = cascade.route(clothes(50))
    assert torch.equal(route, cascade.router(features(cascade.masked, pixels(50), DISPATCHER)))
    assert len(set(route.tolist())) > 1


class OneBad(SomeImages):
    def load(self, i: int, *, near: int | None = None) -> Tensor:
        if i == 3:
            raise BadImageError("cannot read", found="nothing")
        return super().load(i, near=near)


def test_rows_belong_to_images_whatever_cannot_be_read(cascade: Cascade) -> None:
    some: Images = clothes(12)
    bad = OneBad(some, range(12))
    vectors, route = cascade.embed(bad), cascade.route(bad)
    assert vectors.shape == (12, WIDTH)
    assert vectors[3].isnan().all()
    assert route[3] == -1
    others = [i for i in range(12) if i != 3]
    torch.testing.assert_close(vectors[others], cascade.embed(some)[others])
    assert torch.equal(route[others], cascade.route(some)[others])


def test_the_combination_can_be_chosen_for_one_call(cascade: Cascade) -> None:
    unconditional = cascade.embed(clothes(20), combination=UNCONDITIONAL)
    assert not torch.allclose(unconditional, cascade.embed(clothes(20)))
    assert cascade.combination == CONDITIONAL
    with pytest.raises(ConfigError, match="combination"):
        cascade.embed(clothes(20), combination="sum")


def test_the_scale_can_be_chosen_for_every_use(cascade: Cascade) -> None:
    cascade = copy.deepcopy(cascade)
    white = cascade.embed(clothes(30))
    before = cascade.fingerprint(CONDITIONAL)
    cascade.scale = "none"
    deviations = cascade.combinations[CONDITIONAL].variances.sqrt()
    torch.testing.assert_close(cascade.embed(clothes(30)), white * deviations, rtol=1e-3, atol=1e-4)
    assert cascade.fingerprint(CONDITIONAL) != before
    cascade.scale = "whiten"
    assert torch.equal(cascade.embed(clothes(30)), white)
    with pytest.raises(ConfigError, match="scale"):
        cascade.scale = "half"  # type: ignore[assignment]


@pytest.mark.parametrize("combination", [CONDITIONAL, UNCONDITIONAL])
def test_saved_and_loaded_it_gives_the_same_bits(cascade: Cascade, file: Path, combination: str) -> None:
    loaded = Cascade.load(network().eval(), file)
    assert not loaded.training
    images = clothes(60)
    assert torch.equal(cascade.embed(images, combination=combination), loaded.embed(images, combination=combination))
    assert torch.equal(cascade.route(images), loaded.route(images))
    assert (loaded.experts, loaded.width, loaded.scale) == (EXPERTS, WIDTH, "whiten")
    assert loaded.fingerprint(combination) == cascade.fingerprint(combination)


def test_the_same_cascade_gives_the_same_file(cascade: Cascade, file: Path, tmp_path: Path) -> None:
    Cascade.load(network().eval(), file).save(tmp_path / "again.smn")
    assert (tmp_path / "again.smn").read_bytes() == file.read_bytes()


def test_the_base_stays_as_it_was(cascade: Cascade, file: Path) -> None:
    base = network().eval()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    Cascade.load(base, file).embed(clothes(20))
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_experts_are_stored_as_differences(file: Path, tmp_path: Path) -> None:
    parts = inspect_cascade(file).parts
    with safe_open(file, "pt") as opened:
        (tmp_path / "expert.smn").write_bytes(opened.get_tensor("expert.0").numpy().tobytes())
        (tmp_path / "dispatcher.smn").write_bytes(opened.get_tensor("dispatcher").numpy().tobytes())
    from selfmask.maskfile import inspect_mask_file

    assert inspect_mask_file(tmp_path / "expert.smn")[0].relative_to is not None
    assert inspect_mask_file(tmp_path / "dispatcher.smn")[0].relative_to is None
    assert set(parts) == {
        "file",
        "dispatcher",
        *(f"expert.{k}" for k in range(3)),
        "router",
        CONDITIONAL,
        UNCONDITIONAL,
    }
    assert sum(parts.values()) - 2 * parts["file"] < 0  # what is left is the header


def test_two_cascades_have_two_fingerprints(cascade: Cascade, tmp_path: Path) -> None:
    other = fitted(tmp_path, images=150)
    preprocessing = cascade.preprocessing
    first, second = (Embedder("x", each, preprocessing, WIDTH) for each in (cascade, other))
    # What features are kept by: both have the same base and, here, the same dispatcher.
    keys, others = ({name: each.fingerprint(name) for name in SIDES} for each in (first, second))
    assert {side for side in keys if keys[side] == others[side]} == {FROZEN, DISPATCHER}
    other.scale = "none"
    scaled = {name: second.fingerprint(name) for name in SIDES}
    assert {side for side in others if others[side] == scaled[side]} == {FROZEN, DISPATCHER}
    assert len(set(keys.values())) == len(SIDES)


# ---- files that are not what they should be ------------------------------------------------------------------------


def test_a_cascade_on_another_base_is_refused(file: Path) -> None:
    base = network().eval()
    with torch.no_grad():
        next(base.parameters()).add_(0.1)
    with pytest.raises(WrongBaseError):
        Cascade.load(base, file)


def test_cut_off_and_altered_files_are_refused(file: Path, tmp_path: Path) -> None:
    data, other = file.read_bytes(), tmp_path / "other.smn"
    assert is_cascade(file)
    for length in (0, 7, 100, len(data) // 2, len(data) - 1):
        other.write_bytes(data[:length])
        with pytest.raises(MaskFileError):
            Cascade.load(network(), other)
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(len(data), (150,), generator=generator).tolist():
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8
        other.write_bytes(altered)
        with pytest.raises(SelfmaskError):
            Cascade.load(network(), other)
    other.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    with pytest.raises(MaskFileError):
        Cascade.load(network(), other)
    with pytest.raises(NotAMaskFileError):
        Cascade.load(network(), tmp_path / "nothing.smn")
    with pytest.raises(NotAMaskFileError):
        Cascade.load(network(), tmp_path)


def rewritten(file: Path, to: Path, change: str) -> None:
    """A file that says something else, with a sound hash: made to mislead."""
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = dict(opened.metadata())
    if change == "missing expert":
        del tensors["expert.1"]
    elif change == "extra":
        tensors["extra"] = torch.zeros(1)
    elif change == "width":
        metadata["about"] = metadata["about"].replace(f'"width": {WIDTH}', '"width": 17')
    elif change == "many experts":
        metadata["about"] = metadata["about"].replace(f'"experts": {EXPERTS}', '"experts": 1000000')
    elif change == "no number":
        tensors["router.centres"] = tensors["router.centres"] * torch.nan
    elif change == "type":
        tensors["conditional.steps"] = tensors["conditional.steps"].double()
    elif change == "mask is no file":
        tensors["expert.0"] = tensors["expert.0"][:10].contiguous()
    elif change == "swapped":
        tensors["dispatcher"], tensors["expert.0"] = tensors["expert.0"], tensors["dispatcher"]
    elif change == "hidden words":
        metadata["about"] = metadata["about"].replace("gmm", "\\u001b[2J")
    elif change == "about":
        metadata["about"] = "{}"
    elif change == "version":
        metadata["version"] = "9"
    elif change == "format":
        metadata["format"] = "selfmask"
    metadata["sha256"] = content_hash(metadata["about"], tensors)
    save_file(tensors, to, metadata)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        *dict.fromkeys(
            ("missing expert", "extra", "width", "many experts", "no number", "type", "about", "hidden words"), 0
        ).items(),
        ("mask is no file", MaskFileError),
        ("swapped", MaskFileError),
        ("version", UnsupportedVersionError),
        ("format", NotAMaskFileError),
    ],
)
def test_files_made_to_mislead_are_refused(file: Path, tmp_path: Path, change: str, error: type | int) -> None:
    rewritten(file, tmp_path / "other.smn", change)
    with pytest.raises(CorruptCascadeError if error == 0 else error):  # type: ignore[arg-type]
        Cascade.load(network(), tmp_path / "other.smn")
    if change not in ("width", "swapped"):  # which only the base tells
        with pytest.raises(MaskFileError):
            inspect_cascade(tmp_path / "other.smn")


def test_masks_have_the_names_of_their_networks(cascade: Cascade) -> None:
    assert cascade.masked.mask_names == [DISPATCHER, *map(expert_name, range(EXPERTS))]


def test_a_header_that_would_fill_memory_is_not_read(tmp_path: Path) -> None:
    size = 9 << 20
    (tmp_path / "large.smn").write_bytes(struct.pack("<Q", size) + b" " * size)
    assert not is_cascade(tmp_path / "large.smn")
    with pytest.raises(MaskFileError):
        Cascade.load(network(), tmp_path / "large.smn")


def test_the_scale_that_is_set_is_the_one_that_is_saved(cascade: Cascade, tmp_path: Path) -> None:
    cascade = copy.deepcopy(cascade)
    cascade.scale = "none"
    cascade.save(tmp_path / "plain.smn")
    assert Cascade.load(network().eval(), tmp_path / "plain.smn").scale == "none"


def test_images_none_of_which_can_be_read(cascade: Cascade) -> None:
    class Bad(SomeImages):
        def load(self, i: int, *, near: int | None = None) -> Tensor:
            raise BadImageError("cannot read", found="nothing")

    bad = Bad(clothes(4), range(4))
    assert cascade.embed(bad).isnan().all()
    assert cascade.route(bad).tolist() == [-1] * 4
