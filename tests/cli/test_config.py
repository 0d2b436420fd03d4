"""Settings by options and by files: the same, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.inside import selfmask
from tests.cli.small import SMALL, fine, kept, refused

pytestmark = pytest.mark.usefixtures("no_reports")

TOML = """
backbone = "selfmask/tiny"
steps = 2
batch_size = 8
weight_decay = 5e-4
head_lr = 0.15

[mask]
rule = "topk"
active_share = 0.5
select = "paper-resnet"
exclude = ["*.bias"]
fraction = 0.5
fraction_by = "magnitude"
norm = "frozen"

[objective]
name = "swav"
prototypes = 500

[views]
jitter = [0.4, 0.4, 0.4, 0.1]
"""
YAML = """
backbone: selfmask/tiny
steps: 2
batch_size: 8
weight_decay: 5e-4
head_lr: 0.15
mask: {rule: topk, active_share: 0.5, select: paper-resnet, exclude: ["*.bias"], fraction: 0.5,
       fraction_by: magnitude, norm: frozen}
objective: {name: swav, prototypes: 500}
views:
  jitter: [0.4, 0.4, 0.4, 0.1]
"""


def test_options_reach_the_run(long: Path, photos: Path) -> None:
    content = kept(long)
    config, mask = content["config"], content["config"]["mask"]
    assert (mask["rule"], mask["active_share"], mask["select"], mask["exclude"]) == (
        "topk",
        0.5,
        "paper-resnet",
        ["*.bias"],
    )
    assert (mask["fraction"], mask["fraction_by"], mask["norm"]) == (0.5, "magnitude", "frozen")
    assert mask["score_init"] == "kaiming"  # as suits the rule
    assert (config["objective"]["name"], config["objective"]["prototypes"]) == ("swav", 500)
    assert (config["weight_decay"], config["head_lr"], config["views"]["jitter"]) == (5e-4, 0.15, [0.4, 0.4, 0.4, 0.1])
    assert config["lr"] == 6.0  # the preset's, still
    assert content["images"] == str(photos.resolve())


def test_a_rule_that_starts_with_weights_off_falls_back_to_the_frozen_backbone(long: Path) -> None:
    result = json.loads((long / "result.json").read_text())
    assert (result["kept"], result["active"], result["best_step"]) == ("identity", 1.0, 0)


# The formats themselves are tested in tests/settings.
@pytest.mark.parametrize(
    "kind",
    ["toml", "folder", *(pytest.param(kind, marks=pytest.mark.heavy) for kind in ("yaml", "json", "config.json"))],
)
def test_files_say_what_options_say(long: Path, photos: Path, tmp_path: Path, kind: str) -> None:
    names: dict[str, tuple[Path, str]] = {
        "toml": (tmp_path / "a.toml", TOML),
        "yaml": (tmp_path / "a.yaml", YAML),
        "json": (tmp_path / "a.json", json.dumps({"backbone": "selfmask/tiny", **kept(long)["config"]})),
    }
    file = {"config.json": long / "config.json", "folder": long}.get(kind)
    if file is None:
        file, text = names[kind]
        file.write_text(text)
    images = () if kind in ("config.json", "folder") else (photos,)
    fine(selfmask("adapt", *images, "--config", file, "--out", tmp_path / "run"))
    assert kept(tmp_path / "run") == kept(long)
    assert (tmp_path / "run/mask.smn").read_bytes() == (long / "mask.smn").read_bytes()


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("steps = 2\nbatch_sise = 8", (), ("batch_sise", "a.toml, line 2", "did you mean 'batch_size'?")),
        ("[mask]\nrules = 'topk'", (), ("mask.rules", "line 2", "did you mean 'rule'?")),
        ("backbon = 'resnet50'", (), ("line 1", "did you mean 'backbone'?")),
        ("rule = 'topk'", (), ("line 1", "did you mean 'mask.rule'?")),
        ("\nsteps = 'two'", (), ("steps", "line 2", "a whole number", "'two'")),
        ("max_bad = 'some'", (), ("max_bad", "line 1", "a number")),
        ("[mask]\nexclude = '*.bias'", (), ("mask.exclude", "line 2", "a list")),
        ("[mask]\nrule = 'topq'", (), ("line 2", "did you mean 'topk'?")),
        ("[objective]\nname = 'swaw'", (), ("line 2", "did you mean 'swav'?")),
        ("[objective]\nprototypes = 3", (), ("neighbours has no setting 'prototypes'", "line 2", "swav has it")),
        ("preset = 'slow'", (), ("fast or paper",)),
        ("steps = 3", ("--steps", "4"), ("steps = 3 (", "a.toml, line 1", "steps = 4 (--steps)")),
        ("steps = 3", ("--epochs", "1"), ("give one of steps, epochs and budget", "steps 3, epochs 1.0")),
        ("[mask]\nnorm = 'adapt'", ("--norm", "frozen"), ("mask.norm = 'adapt'", "line 2", "'frozen' (--norm)")),
        ("preset = 'paper'", ("--preset", "fast"), ("preset = 'paper'", "preset = 'fast' (--preset)")),
        ("backbone = 'resnet18'", ("--backbone", "selfmask/tiny"), ("'resnet18'", "'selfmask/tiny' (--backbone)")),
        ("", ("--prototypes", "3"), ("neighbours has no setting 'prototypes' (--prototypes)", "swav has it")),
        ("", ("--jitter", "0.1"), ("jitter", "--jitter", "a list of 4")),
        ("", ("--objective", "magic"), ("--objective",)),
        ("steps = 2 3", (), ("a.toml", "line 1")),
    ],
)
def test_mistakes_are_refused_before_the_work(
    photos: Path, tmp_path: Path, text: str, options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    (tmp_path / "a.toml").write_text(text)
    done = selfmask("adapt", photos, "--config", tmp_path / "a.toml", *options, "--out", tmp_path / "run")
    refused(done, *said)
    assert not (tmp_path / "run").exists()


def test_the_same_value_twice_is_no_contradiction(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('images = "photos"\nsteps = 2\nbatch_size = 8\nbackbone = "selfmask/tiny"\n')
    done = selfmask("adapt", "--config", tmp_path / "a.toml", "--steps", "2", "--lr", "20")
    refused(done, "photos")  # which is not there; all else is as it should be
    fine(selfmask("train", photos, *SMALL, "--out", tmp_path / "run"))
    refused(selfmask("adapt", "--config", tmp_path / "run"), "is from `selfmask train`")
