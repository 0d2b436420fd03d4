"""Write the golden files: `python -m tests.maskfile.make_golden`.

Only while format version 2 is not released. Afterwards the files stay as they are for ever, and a change that cannot
read them needs a new version number, and new files beside the old ones, as those of version 1 are. The folder v2 has
files in the plain layout of version 2, with a tensor for each mask and float32 statistics, as they were written first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.maskfile import sharing, write_mask_file
from selfmask.masking.norms import norm_buffers, saved_statistics
from selfmask.preprocessing import Preprocessing

from . import smn
from .tiny import Flags, Tiny, flags, images, set_flags, uniform

_HERE = Path(__file__).parent / "golden"
FOLDERS = {"1": _HERE, "2 plain": _HERE / "v2", "2": _HERE / "v2-compact"}

# What each file is there for; masks are `flags(kind)` of every tensor, so that their bits are known without the file.
GOLDEN: dict[str, dict[str, Any]] = {
    "raw": {"kind": "dense"},
    "rice": {"kind": "large"},
    "lzma": {"kind": "stripes"},
    "on": {"kind": "on"},
    "off": {"kind": "off"},
    "relative": {"kind": "changed", "relative_to": "raw"},
    "fraction-random": {"kind": "sparse", "config": {"fraction": 0.5, "seed": 7}},
    "fraction-magnitude": {"kind": "dense", "config": {"fraction": 0.25, "fraction_by": "magnitude"}},
    "frozen": {"kind": "sparse", "config": {"norm": "frozen"}},
    "topk": {
        "kind": "scores",
        "config": {"rule": "topk", "active_share": 0.9, "select": ["conv*"], "exclude": ["*bias"]},
    },
    "head": {"kind": "large", "head": True, "notes": 'Grüße 🐦 "quoted"\n', "statistics": True},
}
SHARE = {"licence": "CC-BY-4.0", "data": "50 photos of birds, “my own”\n", "training": {"steps": 10, "views": [2, 0.5]}}


def mask_of(kind: str, name: str, index: int) -> Flags:
    """Which weights of one tensor are on."""
    weight = Tiny().get_parameter(name)
    if kind == "changed":  # a few bits away from the file it is relative to
        return flags("dense", weight, index) ^ ~flags("sparse", weight, index + 50)
    return flags(kind, weight, index)


def head() -> dict[str, torch.Tensor]:
    weight = torch.from_numpy(uniform(5 * 40, seed=70)).float().view(5, 40)
    return {"weight": weight, "bias": weight[0, :5].half(), "classes": torch.arange(5)}


def masked_of(name: str) -> MaskedModel:
    """The masked model that a golden file was written from."""
    entry = GOLDEN[name]
    masked = get_masked_model(Tiny(), MaskConfig(**entry.get("config", {})))
    if entry["kind"] == "scores":  # the rule makes the mask
        with torch.no_grad():
            for i, score in enumerate(masked.scores.values()):
                score.copy_(torch.from_numpy(uniform(score.numel(), seed=i + 300)).view_as(score))
    else:
        names = {key: key.replace("/", ".") for key in masked.scores}
        set_flags(masked, {key: mask_of(entry["kind"], names[key], i) for i, key in enumerate(names)})
    if entry.get("statistics"):
        masked._norm.get_buffer("norm/running_mean").copy_(torch.from_numpy(uniform(8, seed=90)))
        masked._norm.get_buffer("norm/running_var").copy_(torch.from_numpy(uniform(8, seed=91) + 0.25))
        masked.base_name = "tiny.golden"
        masked.preprocessing = Preprocessing((9, 9), (0.1, 0.2, 0.3), (0.5, 0.25, 1 / 3), "bicubic")
    return masked


def main() -> None:
    folder, expected = FOLDERS["2"], {}
    folder.mkdir(exist_ok=True)
    for name, entry in GOLDEN.items():
        path = folder / f"{name}.smn"
        masked = masked_of(name)
        mask = masked.pack(head=head() if "head" in entry else None, notes=entry.get("notes", ""))
        if "head" in entry:
            mask = mask.replaced(extensions=sharing(**SHARE))
        reference = masked_of(entry["relative_to"]).pack() if "relative_to" in entry else None
        own = saved_statistics(norm_buffers(masked.base))
        write_mask_file(path, mask, dict(masked.base.named_parameters()), own, relative_to=reference)
        with torch.no_grad():
            outputs = masked(images())[:, :8].double().tolist()
        masks = smn.parse(path.read_bytes()).manifest["masks"]
        expected[name] = {
            "mask_sha256": masked.pack().sha256,
            "fingerprint": masked.pack().fingerprint,
            "base_fingerprint": masked.pack().base_fingerprint,
            "codecs": sorted({mask["codec"] for mask in masks.values()}),
            "num_masked": masked.num_masked,
            "active": sum(masked.pack().active.values()),
            "norm": {key: value.numpy().tobytes().hex() for key, value in masked.pack().norm.items()},
            "outputs": [[round(value, 7) for value in row] for row in outputs],
        }
        print(f"{path.name:24} {path.stat().st_size:6} bytes  {', '.join(expected[name]['codecs'])}")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
