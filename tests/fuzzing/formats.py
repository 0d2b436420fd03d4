"""Every kind of file that we read, with what damages it and what must hold: a typed error, or the right content."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from selfmask import AdaptConfig, Cascade, MaskConfig
from selfmask.backbones import TinyResNet
from selfmask.backbones.weights import load_weights
from selfmask.cascade.file import inspect_cascade
from selfmask.data.class_names import read_class_names
from selfmask.data.folders import open_list
from selfmask.data.named import open_arrays
from selfmask.embedding import loading
from selfmask.embedding.cache import FeatureCache, Vectors
from selfmask.embedding.features import write_features
from selfmask.errors import BackboneError, BaseWarning, DataError, FeatureMapError, MaskFileError, SelfmaskError
from selfmask.evaluation.feature_map import FeatureMap, MadeFor
from selfmask.files import RunFile
from selfmask.maskfile import Fingerprints, state_of
from selfmask.maskfile.layout import NAME
from selfmask.maskfile.packing import Packer
from selfmask.maskfile.packs import OpenedPack
from selfmask.objectives.heads import LinearHead
from selfmask.preprocessing import IMAGENET
from selfmask.settings import merged, typed
from selfmask.settings.configfile import read_config_file
from selfmask.training.folder import RunFolder, checkpoint_file, read_checkpoint
from selfmask.training.methods import MethodName, prepare
from selfmask.training.tuned import About, load_tuned, write_tuned
from tests.cascade.small import fitted, pixels
from tests.embedding.samples import HOW, pictures
from tests.maskfile import smn
from tests.training.small import network

from . import masks
from .mutations import archive, container, edit_json, lines, mangle

Case = tuple[bytes, Any]
"""The bytes of a file, and what is right for them: None where any sound content will do."""
LOADED = "loaded"


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of file: how it is damaged, how it is read, and its share of a thousand mutations."""

    mutate: Callable[[random.Random], Case]
    read: Callable[[Case, Path], str]
    """In a folder of its own; "loaded", or the kind of the error. What must not be, escapes."""
    share: int


def try_one(name: str, number: int, folder: Path) -> str:
    """One mutation, made from its own seed: the same for ever."""
    case = FORMATS[name].mutate(random.Random(f"{name}/{number}"))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # numpy warns before it computes nonsense
        warnings.simplefilter("ignore", BaseWarning)
        warnings.filterwarnings("ignore", module="peft|torch|zipfile")
        return FORMATS[name].read(case, folder)


# ---- cascades -----------------------------------------------------------------------------------------------------


@functools.cache
def cascade_file() -> tuple[bytes, str]:
    """A cascade with two experts, and its identity."""
    with tempfile.TemporaryDirectory() as folder:
        cascade = fitted(Path(folder), experts=2, images=60)
        cascade.save(Path(folder) / "cascade.smn")
        return (Path(folder) / "cascade.smn").read_bytes(), cascade.fingerprint("unconditional")


def mutate_cascade(rng: random.Random) -> Case:
    data, identity = cascade_file()
    if rng.random() < 0.7:
        damaged, guarded = container(data, "about", rng)
        return damaged, identity if guarded else None
    file = smn.parse(data, "about")  # a mask in it, with all hashes made right around it
    key = rng.choice(["dispatcher", "expert.0", "expert.1"])
    inner, _ = container(file.tensors[key][2], "manifest", rng)
    file.with_payload(key, inner)
    words = smn.hashed(file.metadata, file.metadata["about"])
    return smn.assemble({**file.metadata, "sha256": smn.content_hash(words, file.tensors)}, file.tensors), None


def read_cascade(case: Case, folder: Path) -> str:
    data, right = case
    try:
        inspect_cascade(data)
        cascade = Cascade.load(network().eval(), data)
    except MaskFileError as error:
        return type(error).__name__
    if right is not None:
        assert cascade.fingerprint("unconditional") == right, "another cascade was accepted"
    try:
        assert cascade(pixels(2)).shape == (2, cascade.width)
    except MaskFileError as error:
        return type(error).__name__
    return LOADED


# ---- packs --------------------------------------------------------------------------------------------------------

IN_PACK = ("sparse", "large", "off", "mixed", "fraction", "frozen", "shared", "stripes")


@functools.cache
def pack_file() -> tuple[bytes, dict[str, str]]:
    """A pack of all kinds of masks, some as their files, and the identity of each."""
    packer = Packer(masks.base().as_base())
    found = {name: masks.corpus()[name][1] for name in IN_PACK}
    for name, mask in found.items():
        packer.add(name, mask)
    return packer.pack(), {name: mask.sha256 for name, mask in found.items()}


def mutate_pack(rng: random.Random) -> Case:
    data, right = pack_file()
    if rng.random() < 0.8:
        damaged, guarded = container(data, "about", rng)
        return damaged, right if guarded else None
    file = smn.parse(data, "about")  # a mask file in it, with all hashes made right around it
    key = rng.choice([key for key in sorted(file.tensors) if key.startswith("file.")])
    inner, _ = container(file.tensors[key][2], "manifest", rng)
    file.with_payload(key, inner)
    words = smn.hashed(file.metadata, file.metadata["about"])
    return smn.assemble({**file.metadata, "sha256": smn.content_hash(words, file.tensors)}, file.tensors), None


def read_pack(case: Case, folder: Path) -> str:
    data, right = case
    try:
        found = dict(OpenedPack(data).masks(masks.base().as_base()))
    except MaskFileError as error:
        return type(error).__name__
    assert all(NAME.fullmatch(name) for name in found)
    if right is not None:
        assert {name: mask.sha256 for name, mask in found.items()} == right, "other masks were accepted"
    for mask in found.values():
        assert all(bool(value.isfinite().all()) for value in mask.norm.values()), "statistics that are no numbers"
    return LOADED


# ---- tuned weights ------------------------------------------------------------------------------------------------

METHODS: tuple[MethodName, ...] = ("full", "lora", "bitfit")


def tuned_base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 16)).eval()


@functools.cache
def tuned_files() -> list[tuple[bytes, str]]:
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            model = tuned_base()
            fingerprint = Fingerprints().of(state_of(model).stored)
            learner = prepare(model, method, MaskConfig(), 4)
            about = About(method, "selfmask/tiny", fingerprint, IMAGENET, 4, learner.targets)
            write_tuned(Path(folder) / "a", learner, LinearHead(16, ["a", "b"]), about)
            files.append(((Path(folder) / "a").read_bytes(), Fingerprints().of(model.state_dict())))
    return files


def mutate_tuned(rng: random.Random) -> Case:
    data, identity = rng.choice(tuned_files())
    damaged, guarded = container(data, "about", rng)
    return damaged, identity if guarded else None


def read_tuned(case: Case, folder: Path) -> str:
    data, right = case
    try:
        model, head = load_tuned(tuned_base(), data)
    except SelfmaskError as error:
        return type(error).__name__
    if right is not None:
        assert Fingerprints().of(model.state_dict()) == right, "other weights were accepted"
    vectors = model(torch.ones(2, 3, 3, 3))
    if head.ranked(vectors).shape[0] != 2:
        raise AssertionError("a head that does not fit")
    return LOADED


# ---- maps ---------------------------------------------------------------------------------------------------------


@functools.cache
def map_file() -> tuple[bytes, str]:
    """A map, and its identity."""
    vectors = pixels(60).flatten(1)[:, 500:512]
    whiten = FeatureMap.fit(vectors, made_for=MadeFor("0" * 64, IMAGENET))
    with tempfile.TemporaryDirectory() as folder:
        whiten.save(Path(folder) / "map")
        return (Path(folder) / "map").read_bytes(), whiten.sha256


def mutate_map(rng: random.Random) -> Case:
    damaged, guarded = container(map_file()[0], "about", rng)
    return damaged, map_file()[1] if guarded else None


def read_map(case: Case, folder: Path) -> str:
    data, right = case
    try:
        whiten = FeatureMap.load(data)
    except FeatureMapError as error:
        return type(error).__name__
    if right is not None:
        assert whiten.sha256 == right, "another map was accepted"
    for power in (0.0, 1.0):
        vectors = whiten.at(power)(torch.ones(2, whiten.width))
        assert bool(vectors.isfinite().all()), "vectors that are no numbers"
    return LOADED


# ---- vectors ------------------------------------------------------------------------------------------------------

ROWS = Vectors(torch.arange(12.0).view(4, 3), [0, 1, 3, 4])


@functools.cache
def cached() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        FeatureCache(Path(folder), print).put("key", ROWS)
        return (Path(folder) / "key.safetensors").read_bytes()


def mutate_cached(rng: random.Random) -> Case:
    damaged, guarded = container(cached(), "", rng)
    return damaged, ROWS if guarded else None


def read_cached(case: Case, folder: Path) -> str:
    (folder / "key.safetensors").write_bytes(case[0])
    found = FeatureCache(folder, print).get("key")
    if found is None:
        return "not used"
    if case[1] is not None:
        assert torch.equal(found.rows, ROWS.rows), "other vectors"
        assert found.kept == ROWS.kept
    assert len(found.rows) == len(found.kept)
    return LOADED


@functools.cache
def begun() -> tuple[Path, dict[str, bytes], bytes]:
    """Images, the folder that an `embed` cut short leaves, and the file that it would have come to."""
    place = Path(tempfile.mkdtemp())
    images = pictures(place / "images", 6)
    write(place / "whole.npz", images)
    seen = 0

    def stop(done: int, total: int) -> None:
        nonlocal seen
        if (seen := done) > 4:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        write(place / "cut.npz", images, stop)
    parts = {path.name: path.read_bytes() for path in (place / "cut.npz.partial").iterdir()}
    return images, parts, (place / "whole.npz").read_bytes()


class Mean(nn.Module):
    """A network that is fast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) * self.weight


def write(path: Path, images: Path, progress: Any = None) -> None:
    from selfmask.data import open_images
    from selfmask.embedding import features
    from selfmask.embedding.embedder import Embedder

    whole = features._PART
    features._PART = 2
    try:
        how = dataclasses.replace(HOW, size=(8, 8))
        write_features(
            path,
            Embedder("mean", Mean().eval(), how, 3),
            open_images(images),
            batch_size=2,
            workers=1,
            progress=progress,
            say=lambda _: None,
        )
    finally:
        features._PART = whole


def mutate_parts(rng: random.Random) -> Case:
    _, parts, _ = begun()
    name = rng.choice(sorted(parts))
    damaged, guarded = archive(parts[name], rng) if name.endswith(".npz") else (mangle(parts[name], rng), True)
    return damaged, (name, guarded)


def read_parts(case: Case, folder: Path) -> str:
    images, parts, whole = begun()
    partial = folder / "cut.npz.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, data in parts.items():
        (partial / name).write_bytes(case[0] if name == case[1][0] else data)
    try:
        write(folder / "cut.npz", images)
    except SelfmaskError as error:
        return type(error).__name__
    if case[1][1]:
        assert (folder / "cut.npz").read_bytes() == whole, "other vectors were written"
    return LOADED


# ---- runs ---------------------------------------------------------------------------------------------------------

STATE = {
    "step": 7,
    "model": {"scores.a": torch.arange(6.0).view(2, 3), "norm": torch.ones(2, dtype=torch.float64)},
    "optimizer": {"state": {0: {"momentum": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    "random": torch.get_rng_state()[:64].clone(),
    "words": ["a", None, True, 0.5],
}


@functools.cache
def checkpoint() -> bytes:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    return buffer.getvalue()


def mutate_checkpoint(rng: random.Random) -> Case:
    damaged, guarded = archive(checkpoint(), rng)
    return damaged, STATE if guarded else None


def read_a_checkpoint(case: Case, folder: Path) -> str:
    file = checkpoint_file(folder, "last")
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(case[0])
    try:
        found = read_checkpoint(folder, "last")
    except SelfmaskError as error:
        return type(error).__name__
    assert isinstance(found, dict)
    if case[1] is not None:
        assert same(found, case[1]), "another state was accepted"
    return LOADED


def same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(b, dict):
        return isinstance(a, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list):
        return isinstance(a, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


CONFIGS = {
    ".toml": 'steps = 10\npreset = "fast"\n[mask]\nrule = "threshold"\nselect = ["conv*", "layer1.*"]\nmu = 0.5\n'
    '[objective]\nname = "swav"\nprototypes = 8\n',
    ".yaml": "steps: 10\nmask:\n  rule: topk\n  active_share: 5e-1\n  select: [conv*, 'layer1.*']\n"
    "objective: {name: swav, prototypes: 8}\n",
    ".json": '{"steps": 10, "mask": {"rule": "threshold", "mu": 0.5, "select": ["conv*"]},\n'
    ' "objective": {"name": "swav"}}',
}


def mutate_text(texts: dict[str, str], rng: random.Random) -> Case:
    """One of these text files, by its suffix, damaged."""
    suffix = rng.choice(sorted(texts))
    return lines(texts[suffix], rng), suffix


def written(case: Case, folder: Path) -> Path:
    path = folder / f"text{case[1]}"
    path.write_bytes(case[0])
    return path


def read_config(case: Case, folder: Path) -> str:
    try:
        values = read_config_file(written(case, folder)).values
        values.pop("preset", None)
        merged(AdaptConfig, typed(AdaptConfig, values))
    except SelfmaskError as error:
        return type(error).__name__
    return LOADED


RUN: dict[str, Any] = {
    "verb": "adapt",
    "images": "photos",
    "backbone": "selfmask/tiny",
    "weights": None,
    "config": {"steps": 10, "mask": {"rule": "topk"}},
    "facts": {"base": "0123456789abcdef", "steps": 10},
}


def mutate_run(rng: random.Random) -> Case:
    import json

    if rng.random() < 0.5:
        return lines(json.dumps(RUN, indent=2), rng), None
    return json.dumps(edit_json(copy.deepcopy(RUN), rng)).encode("utf-8", "surrogatepass"), None


def read_run(case: Case, folder: Path) -> str:
    (folder / RunFile.CONFIG).write_bytes(case[0])
    outcome = LOADED
    for read in (lambda: RunFolder.read_json(folder / RunFile.CONFIG), lambda: loading._backbone_of(folder)):
        try:
            read()
        except SelfmaskError as error:
            outcome = type(error).__name__
    return outcome


# ---- data ---------------------------------------------------------------------------------------------------------

LISTS = {
    ".txt": "path\tlabel\na/1.jpg\tcat\na/2.jpg\tdog\nb, c.png\tcat\n",
    ".csv": 'file,label\n"a,b.jpg",3\nc.png,4\n../d.png,5\n',
    ".parts": "path,label,split\na.jpg,cat,train\nb.jpg,dog,test\nc.jpg,cat,val\nd.jpg,dog,train\n",
    ".names": "tabby cat\nankle_boot\nbird\n",
}


def read_list(case: Case, folder: Path) -> str:
    path = written(case, folder)
    try:
        if case[1] == ".names":
            assert all(isinstance(name, str) for name in read_class_names(path))
            return LOADED
        images = open_list(path, "train")
    except DataError as error:
        return type(error).__name__
    assert len(images.files) == len(images.names) == len(images)
    for name in images.names:
        name.encode()
    if images.labels is not None:
        assert len(images.labels) == len(images)
        assert images.classes is None or max(images.labels) < len(images.classes)
    return LOADED


PIXELS = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)


@functools.cache
def arrays() -> bytes:
    buffer = io.BytesIO()
    labels, classes = np.array([0, 1, 1, 0]), np.array(["cat", "dög"])
    np.savez_compressed(buffer, train_images=PIXELS, train_labels=labels, test_images=PIXELS[:2], classes=classes)
    return buffer.getvalue()


def mutate_arrays(rng: random.Random) -> Case:
    damaged, guarded = archive(arrays(), rng)
    return damaged, PIXELS if guarded else None


def read_arrays(case: Case, folder: Path) -> str:
    path = folder / "a.npz"
    path.write_bytes(case[0])
    try:
        images = open_arrays(path, "train")
    except DataError as error:
        return type(error).__name__
    if case[1] is not None:
        assert np.array_equal(images.pixels, PIXELS), "other pixels"
    if len(images):
        assert images[0].ndim == 3
    return LOADED


# ---- weights ------------------------------------------------------------------------------------------------------


@functools.cache
def weights() -> dict[str, bytes]:
    from safetensors.torch import save

    small = {name: value for name, value in TinyResNet().state_dict().items() if name.startswith("stem")}
    buffer = io.BytesIO()
    torch.save({"state_dict": small}, buffer)
    return {".safetensors": save(small), ".pt": buffer.getvalue()}


def mutate_weights(rng: random.Random) -> Case:
    suffix = rng.choice(sorted(weights()))
    data = weights()[suffix]
    return (archive(data, rng) if suffix == ".pt" else container(data, "", rng))[0], suffix


@functools.cache
def stem() -> nn.Module:
    return _Stem()


class _Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = TinyResNet().stem


def read_weights_file(case: Case, folder: Path) -> str:
    path = folder / f"weights{case[1]}"
    path.write_bytes(case[0])
    try:
        load_weights(stem(), path, "stem")
    except BackboneError as error:
        return type(error).__name__
    return LOADED


FORMATS = {
    "mask": Format(masks.mutate, lambda case, folder: masks.read(case, folder / "a.smn"), 284),
    "cascade": Format(mutate_cascade, read_cascade, 70),
    "pack": Format(mutate_pack, read_pack, 50),
    "tuned": Format(mutate_tuned, read_tuned, 40),
    "map": Format(mutate_map, read_map, 60),
    "vectors (cache)": Format(mutate_cached, read_cached, 100),
    "vectors (parts)": Format(mutate_parts, read_parts, 4),
    "checkpoint": Format(mutate_checkpoint, read_a_checkpoint, 80),
    "config": Format(functools.partial(mutate_text, CONFIGS), read_config, 80),
    "run folder": Format(mutate_run, read_run, 60),
    "list": Format(functools.partial(mutate_text, LISTS), read_list, 72),
    "npz": Format(mutate_arrays, read_arrays, 60),
    "weights": Format(mutate_weights, read_weights_file, 40),
}
assert sum(each.share for each in FORMATS.values()) == 1000
