"""The command line as a whole, and `inspect`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from selfmask import MaskConfig, cli, get_masked_model
from selfmask.cli import VERBS, load

from .inside import selfmask


@pytest.fixture
def mask_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3))
    masked = get_masked_model(model, MaskConfig(rule="topk", active_share=0.75))
    masked.save_pretrained(tmp_path / "a.smn", notes="[bold]not markup[/bold]")
    return tmp_path / "a.smn"


def test_inspect_shows_sizes_layers_and_notes(mask_file: Path) -> None:
    result = selfmask("inspect", str(mask_file))
    assert result.returncode == 0, result.stderr
    assert "75.00%" in result.stdout
    assert f"{mask_file.stat().st_size:,}" in result.stdout
    assert "[bold]not markup[/bold]" in result.stdout


def test_inspect_json_adds_up(mask_file: Path) -> None:
    found = json.loads(selfmask("inspect", str(mask_file), "--json").stdout)
    sizes = found["bytes"]
    assert sizes["file"] == mask_file.stat().st_size
    assert sizes["file"] == sizes["masks"] + sizes["norm"] + sizes["head"] + sizes["words"]
    weights = 16 * 3 * 9 + 16 + 32 * 16 * 9 + 32
    assert (found["bits"], sizes["float32"]) == (weights, 4 * weights)
    assert 0 < sizes["norm"] < 16  # as in the base, which takes 128 bytes otherwise
    assert found["active_share"] == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize("content", [None, b"", b"text, not a mask", b"\xff" * 64])
def test_inspect_of_anything_else_is_an_error_with_advice(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.smn"
    if content is not None:
        path.write_bytes(content)
    result = selfmask("inspect", str(path))
    assert result.returncode == 2
    assert "error:" in result.stderr
    assert "do:" in result.stderr
    assert "Traceback" not in result.stderr


def test_damage_is_seen_without_the_base(mask_file: Path) -> None:
    data = bytearray(mask_file.read_bytes())
    data[-3] ^= 1
    mask_file.write_bytes(data)
    result = selfmask("inspect", str(mask_file))
    assert result.returncode == 2
    assert "altered" in result.stderr


def test_help_names_every_verb_with_the_first_sentence_of_its_own() -> None:
    result = selfmask("--help")
    assert result.returncode == 0
    shown = " ".join(result.stdout.replace("│", " ").split())
    for verb, words in VERBS.items():
        assert f"{verb} {words}" in shown
        assert (load(verb).help or "").partition("\n\n")[0] == words


def test_ctrl_c_after_the_end_is_too_late() -> None:
    code = "import signal, sys\nfrom selfmask.cli import main\nsys.argv = ['selfmask', '--help']\n"
    code += "try:\n    main()\nexcept SystemExit:\n    sys.exit(signal.getsignal(signal.SIGINT) != signal.SIG_IGN)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_verb_that_does_not_exist_is_a_mistake_in_usage() -> None:
    result = selfmask("adpat")
    assert result.returncode == 2
    assert "adapt" in result.stderr


HEAVY = ("torch", "numpy", "scipy", "accelerate")
TOO_HEAVY = ("torchvision", "torch._dynamo", "timm", "sklearn", "matplotlib", "peft", "transformers", "tensorboard")
LOADED = """
import io, json, os, sys
from contextlib import redirect_stdout
from selfmask.cli import app

def loaded(*words, **environment):
    os.environ.update(environment)
    sys.argv, out = ["selfmask", *words], io.StringIO()
    with redirect_stdout(out):
        try:
            app()
        except SystemExit:
            pass
    return out.getvalue(), len(sys.modules), [name for name in HEAVY if name in sys.modules]

completing = dict(_SELFMASK_COMPLETE="complete_bash", COMP_WORDS="selfmask ada", COMP_CWORD="1")
first = loaded(**completing)
del os.environ["_SELFMASK_COMPLETE"]
print(json.dumps([first, loaded("--help"), loaded("adapt", "--help")]))
"""


@pytest.mark.heavy
def test_help_and_completion_come_at_once() -> None:
    """Nothing of torch is imported for verbs, and nothing but torch and its own for the options of one."""
    code = f"HEAVY = {(*HEAVY, *TOO_HEAVY)!r}\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    (completed, _, none), (shown, modules, still_none), (_, _, some) = json.loads(done.stdout)
    assert completed.split() == ["adapt"]
    assert "cascade" in shown
    assert none == still_none == []
    assert modules < 500
    assert set(some) <= set(HEAVY)


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "3"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}]
)
def test_errors_are_shown_whatever_the_rank(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = selfmask("inspect", tmp_path / "nothing.smn")
    assert done.returncode == 2
    number = variables.get("RANK", "0")
    assert ("error:" if number == "0" else f"error in process {number}:") in done.stderr


def test_ctrl_c_is_no_traceback_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where typer does not listen yet."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_app", interrupted)
    done = selfmask("inspect", "a.smn")
    assert (done.returncode, done.stderr) == (130, "Aborted.\n")
