"""Every command and every piece of Python that README and docs show is parsed here, and by `make test-all` run.

On pictures in `photos/` and `labelled/`. What would need a network or hours is made smaller: the backbone is the
bundled one, runs have two steps and batches of eight images.
"""

import ast
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from typer.core import TyperCommand

from selfmask.cli.adapt import NOTHING_GAINED
from selfmask.cli.check import DRIFTED

from .cli.inside import Done, selfmask
from .cli.test_adapt import save_clothes
from .commands.test_many_masks import save as save_mask
from .data.movies import write as write_movie
from .data.shards import shards

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BIN = Path(sys.executable).parent
ELSEWHERE = (  # run by other tests: thousands of images, and the hub (tests/hub/test_shell.py)
    "selfmask/fashion",
    "runs/clothes",
    "cifar10",
    "hf://",
    "--push",
)


def commands(page: Path) -> list[str]:
    """Indented lines that call one of our programs, without their comments."""
    lines = re.findall(r"^    ((?:make|selfmask|torchrun|python) .*)$", page.read_text(), flags=re.MULTILINE)
    return [re.split(r"\s#", line)[0].strip() for line in lines]


def smaller(text: str) -> str:
    if text.startswith("selfmask serve"):
        return re.sub(r"--backbone \S+", "--backbone selfmask/tiny", text)
    text = re.sub(r"--backbone \S+", "--backbone selfmask/tiny --batch-size 8 --steps 2", text)
    if "--budget" in text:
        text = re.sub(r"--budget \S+", "--budget 2s", text).replace(" --steps 2", "")
    text = re.sub(r"^(selfmask compare .*)", r"\1 --adapt-steps 2 --seeds 1", text)
    if "--no-labels" in text:
        text = text.replace(" --steps 2", "")  # of runs with labels, which there are none of
    text = re.sub(r"^(selfmask cascade .*--backbone .*)", r"\1 --experts 2 --components 4 --router kmeans", text)
    text = text.replace('load_backbone("resnet50")', 'load_backbone("selfmask/tiny")')
    return re.sub(r"steps=\d+", "batch_size=8, steps=2", text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    save_clothes(folder / "photos", 60)
    save_clothes(folder / "labelled", 60)
    save_clothes(folder / "new-photos", 60)
    for seed, name in enumerate(("birds", "bats", "bees")):
        save_mask(folder / "masks" / f"{name}.smn", seed)
    shards(folder / "shards")
    write_movie(folder / "movie.mp4")
    shutil.copy(next((folder / "photos").rglob("*.png")), folder / "photo.jpg")
    for name in ("keys", "admin"):
        (folder / f"{name}.txt").write_text(f"{name}-of-a-server-of-tests\n")
    for page in PAGES:
        for name, text in re.findall(r"```toml\n# (\S+)\n(.*?)```", page.read_text(), flags=re.DOTALL):
            text = re.sub(r"steps = \d+", "steps = 2\nbatch_size = 8", text)
            (folder / name).write_text(text.replace('"resnet50"', '"selfmask/tiny"'))
    return folder


def starts_and_stops(arguments: list[str], place: Path) -> int:
    """A server is started, asked whether it is well, and told to stop: its exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([BIN / "selfmask", *arguments, "--port", str(port)], cwd=place)
    try:
        until = time.monotonic() + 180  # beside heavy tests, a process may take a minute to start
        while server.poll() is None and time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                assert answer.status == 200
                server.send_signal(signal.SIGTERM)
                code = server.wait(60)
                return 0 if code == -signal.SIGTERM else code  # uvicorn passes the signal on when all is finished
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait()
    return -1


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


WITH_PYTHON = [page for page in PAGES if blocks(page)]


def test_python_is_python_and_imports_what_there_is() -> None:
    assert {"README.md", "adapt.md", "train.md", "cascade.md"} <= {page.name for page in WITH_PYTHON}
    for page in WITH_PYTHON:
        for block in blocks(page):
            imports = [part for part in ast.walk(ast.parse(block)) if isinstance(part, ast.Import | ast.ImportFrom)]
            assert imports
            exec(compile(ast.Module(imports, []), page.name, "exec"), {})


def test_commands_exist_with_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is parsed as it stands there, and nothing is run."""
    parsed: list[str | None] = []
    monkeypatch.setattr(TyperCommand, "invoke", lambda command, context: parsed.append(command.name))
    ours = 0
    for page in PAGES:
        for command in commands(page):
            program, *words = shlex.split(command)
            if program == "torchrun":
                words = words[words.index("selfmask") + 1 :]
            if program in ("selfmask", "torchrun"):
                ours += 1
                done = selfmask(*words)
                assert done.returncode == 0, f"{page.name}: {command}\n{done.stderr}"
    assert len(parsed) == ours > 30
    assert selfmask("adapt", "photos", "--no-such-option").returncode == 2


@pytest.mark.heavy
@pytest.mark.parametrize(
    "page",
    # tests/backbones/test_text.py runs that of CLIP, on a CLIP that is small enough
    [page for page in WITH_PYTHON if page.name != "clip.md"],
    ids=lambda page: page.name,
)
def test_python_runs(place: Path, page: Path) -> None:
    for block in blocks(page):
        subprocess.run([sys.executable, "-c", smaller(block)], cwd=place, check=True)


@pytest.mark.heavy
def test_commands_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes minutes (`make`, demo, comparison, benchmarks, pretraining) is only seen to exist; others test it."""
    found = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
    assert {"make demo", "make test"} <= set(found)
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not the cluster of another test, which may be about to be killed
    for command in found:
        program, *arguments = shlex.split(smaller(command))
        if program == "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        elif program == "python":
            assert arguments[0] == "-m"
            assert (ROOT / f"{arguments[1].replace('.', '/')}.py").exists()
        elif arguments[0] == "study" and not {"list", "--dry-run"} & set(arguments):  # minutes; tests/cli/test_study.py
            assert selfmask("study", "--help").returncode == 0
        elif arguments[0] == "serve":
            assert starts_and_stops(arguments, place) == 0, command
        elif arguments[0] in ("demo", "pretrain", "doctor", "push", "pull") or any(
            each in command for each in ELSEWHERE
        ):
            assert selfmask(arguments[0], "--help").returncode == 0
        else:
            if program == "selfmask":
                monkeypatch.chdir(place)
                done = selfmask(*arguments)
            else:
                run = subprocess.run([BIN / program, *arguments], cwd=place, capture_output=True, text=True)
                done = Done(run.returncode, run.stdout, run.stderr)
            # Two steps may well gain nothing, which an exit code of its own tells.
            gained = (0, NOTHING_GAINED)
            fine = {"adapt": gained, "find": gained, "check": (*gained, DRIFTED)}.get(arguments[0], (0,))
            fine = (0, NOTHING_GAINED) if "adapt" in arguments else fine
            assert done.returncode in fine, f"{command}\n{done.stdout}\n{done.stderr}"


def test_promises_name_tests_that_exist() -> None:
    table = (ROOT / "docs" / "security.md").read_text().partition("| promise |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named or "<!--" in row, row
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), flags=re.MULTILINE), f"{file}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith(("http", "#")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
