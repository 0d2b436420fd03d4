"""CLIP checkpoints of Hugging Face transformers: `transformers/FOLDER` or `transformers/OWNER/NAME`.

FOLDER is what `save_pretrained` wrote; OWNER/NAME is a repository of the hub. A folder that exists goes first.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL.Image import Resampling
from torch import Tensor, nn

from ..errors import BadWeightsError, MissingExtraError, NotABackboneError, UnknownBackboneError
from ..preprocessing import Preprocessing
from .recipe import Recipe, TextTower
from .sources import HubFile, InstalledFile, Source, fetch
from .weights import StateDict, load_weights

PREFIX = "transformers/"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_HUGE = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
_BASE_32, _BASE_16, _LARGE_14 = _BASE | {"patch_size": 32}, _BASE | {"patch_size": 16}, _LARGE | {"patch_size": 14}
_GELU = {"hidden_act": "gelu"}
# Image towers that can be listed, and built for a file of weights, without asking the hub; with the width of vectors.
_WELL_KNOWN: dict[str, tuple[dict[str, Any], int]] = {
    "openai/clip-vit-base-patch32": (_BASE_32, 512),
    "openai/clip-vit-base-patch16": (_BASE_16, 512),
    "openai/clip-vit-large-patch14": (_LARGE_14, 768),
    "openai/clip-vit-large-patch14-336": (_LARGE_14 | {"image_size": 336}, 768),
    "laion/CLIP-ViT-B-32-laion2B-s34B-b79K": (_BASE_32 | _GELU, 512),
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": (_BASE_16 | _GELU, 512),
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": (_HUGE | {"patch_size": 14} | _GELU, 1024),
}
# The commits of these that are downloaded; a repository may change under its name.
_COMMITS = {
    "openai/clip-vit-base-patch32": "3d74acf9a28c67741b2f4f2ea7635f0aaf6f0268",
    "openai/clip-vit-base-patch16": "57c216476eefef5ab752ec549e440a49ae4ae5f3",
    "openai/clip-vit-large-patch14": "32bd64288804d66eefd0ccbe215aa642df71cc41",
}


def names() -> list[str]:
    """Some that are well known; any other CLIP of the hub can be named too."""
    return [PREFIX + repository for repository in _WELL_KNOWN]


def resolve(name: str) -> Recipe | None:
    if not name.startswith(PREFIX):
        return None
    place = _Place.of(name)
    if place.folder is None and place.where in _WELL_KNOWN:
        vision, width = _WELL_KNOWN[place.where]
        config = _transformers().CLIPConfig(vision_config=dict(vision), projection_dim=width)
        preprocessing: dict[str, Any] = {}
    else:
        config = _config(place)
        preprocessing = _image_processor(place)

    def build() -> nn.Module:
        return _ImageTower(config)

    def load(path: Path) -> nn.Module:
        model = build()
        load_weights(model, path, name, _without_positions)
        return model

    weights = place.source(*_WEIGHTS)
    return Recipe(build, _preprocessing(config, preprocessing, name), weights, load, lambda model: _without_positions)


def text_tower(name: str) -> TextTower | None:
    if not name.startswith(PREFIX):
        return None
    place = _Place.of(name)
    config = _config(place)
    tokenize = _tokenizer(place, config.text_config)
    model = _TextTower(config)
    return TextTower(model, tokenize, model, _without_positions)


class _ImageTower(nn.Module):
    """Images -> projected vectors; its weights have the names that published files give them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        whole = _build("CLIPVisionModelWithProjection", config.vision_config, config.projection_dim)
        self.vision_model, self.visual_projection = whole.vision_model, whole.visual_projection

    def forward_features(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.vision_model(pixel_values=images).last_hidden_state
        return tokens

    def forward(self, images: Tensor) -> Tensor:
        vectors: Tensor = self.visual_projection(self.vision_model(pixel_values=images).pooler_output)
        return vectors


class _TextTower(nn.Module):
    """Tokens -> projected vectors; its weights have the names that published files give them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        whole = _build("CLIPTextModelWithProjection", config.text_config, config.projection_dim)
        self.text_model, self.text_projection = whole.text_model, whole.text_projection
        self.logit_scale = nn.Parameter(whole.text_projection.weight.new_tensor(config.logit_scale_init_value))

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.text_projection(self.text_model(input_ids=tokens).pooler_output)
        return vectors


def _build(kind: str, config: Any, width: int) -> Any:
    config = copy.deepcopy(config)  # building writes into it
    config.projection_dim = width  # of the whole: what the towers say of it may be another, and is not heeded
    return getattr(_transformers(), kind)(config).float()


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the files of a checkpoint are."""

    name: str
    where: str
    folder: Path | None
    """None where it is a repository of the hub."""

    @classmethod
    def of(cls, name: str) -> _Place:
        where = name.removeprefix(PREFIX)
        if where and Path(where).is_dir():
            return cls(name, where, Path(where))
        if not _REPOSITORY.fullmatch(where):
            raise UnknownBackboneError(
                f"there is no backbone {name!r}",
                expected=f"{PREFIX} and an existing folder, or a repository such as {', '.join(names()[:2])}",
                found="no such folder",
                todo=f"check the path, or list names with `selfmask backbones {PREFIX}`",
            )
        return cls(name, where, None)

    def source(self, *files: str) -> Source:
        """The first of these files that is there."""
        if self.folder is None:
            return _HubFile(self.where, files, _COMMITS.get(self.where))
        paths = [self.folder / file for file in files]
        path = next((path for path in paths if path.is_file()), paths[0])
        return InstalledFile(path, "give a folder with all that save_pretrained writes, of the model and its processor")

    def json(self, *files: str) -> dict[str, Any]:
        path = fetch(self.source(*files), self.name)
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise BadWeightsError(f"cannot read {path}", expected="JSON", found=error) from error
        if not isinstance(content, dict):
            raise BadWeightsError(f"cannot use {path}", expected="a JSON object", found=type(content).__name__)
        return content


@dataclasses.dataclass(frozen=True)
class _HubFile(HubFile):
    @property
    def todo(self) -> str:
        return (
            f"where there is a network, get all of it (hf download {self.repo} --local-dir FOLDER), bring the folder "
            f"here and name it: {PREFIX}FOLDER; or bring a Hugging Face cache that has it here and let HF_HOME name it"
        )


def _config(place: _Place) -> Any:
    stored = place.json("config.json")
    if stored.get("model_type") != "clip":
        raise NotABackboneError(
            f"{place.name} is not a CLIP model",
            expected='model_type "clip" in its config.json',
            found=repr(stored.get("model_type")),
            todo="choose a CLIP model; find other networks in timm with: selfmask backbones PATTERN",
        )
    try:
        return _transformers().CLIPConfig.from_dict(stored)
    except Exception as error:  # whatever the library makes of settings that can be anything
        raise BadWeightsError(f"cannot use the config.json of {place.name}", found=error) from error


def _image_processor(place: _Place) -> dict[str, Any]:
    """How images must be prepared, as far as the checkpoint says it."""
    # Newer releases of transformers keep it inside the description of the processor of both images and texts.
    files = ("preprocessor_config.json", "processor_config.json")
    if place.folder is not None and place.source(*files).local() is None:
        return {}
    stored = place.json(*files)
    inner = stored.get("image_processor")
    return inner if isinstance(inner, dict) else stored


def _preprocessing(config: Any, preprocessing: dict[str, Any], name: str) -> Preprocessing:
    """In the size of the tower itself, which takes no other; what is not said is as OpenAI's CLIPs have it."""
    size = config.vision_config.image_size
    try:
        height, width = (size, size) if isinstance(size, int) else map(int, size)
        mean, std = (
            tuple(float(value) for value in preprocessing.get(key) or usual)
            for key, usual in (("image_mean", _MEAN), ("image_std", _STD))
        )
        if not len(mean) == len(std) == 3:
            raise ValueError(f"mean {mean} and standard deviation {std} for three channels")
        interpolation = Resampling(preprocessing.get("resample", Resampling.BICUBIC)).name.lower()
    except (TypeError, ValueError) as error:
        raise BadWeightsError(
            f"the preprocessing of {name} cannot be read from its files",
            expected="image_size, image_mean, image_std and resample, as in any CLIP model",
            found=error,
        ) from error
    return Preprocessing((height, width), mean, std, interpolation)


def _tokenizer(place: _Place, config: Any) -> Callable[[list[str]], Tensor]:
    vocabulary = fetch(place.source("tokenizer.json", "vocab.json"), place.name)
    if vocabulary.name == "vocab.json":
        fetch(place.source("merges.txt"), place.name)
    if place.folder is None:
        fetch(place.source("tokenizer_config.json"), place.name)
    try:
        tokenizer = _transformers().AutoTokenizer.from_pretrained(
            vocabulary.parent, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of files that can be anything
        raise BadWeightsError(f"cannot use the tokenizer of {place.name}", found=error) from error
    # The end of a text is where its vector is read; 2 is what old checkpoints say, which are read at the largest token.
    if config.eos_token_id not in (2, tokenizer.eos_token_id) or len(tokenizer) > config.vocab_size:
        raise BadWeightsError(
            f"the tokenizer of {place.name} does not belong to its text tower",
            expected=f"up to {config.vocab_size} tokens, with end-of-text token {config.eos_token_id}",
            found=f"{len(tokenizer)} tokens, with end-of-text token {tokenizer.eos_token_id}",
            todo="put the tokenizer that the model was trained with in its folder",
        )

    def tokenize(texts: list[str]) -> Tensor:
        length = config.max_position_embeddings
        tokens: Tensor = tokenizer(
            texts, padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).input_ids
        return tokens

    return tokenize


def _without_positions(tensors: StateDict) -> StateDict:
    """Old checkpoints store the numbers 0, 1, 2, … of positions."""
    return {key: value for key, value in tensors.items() if not key.endswith(".position_ids")}


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(
            "transformers is not installed",
            found=str(error),
            todo='pip install "selfmask[clip]"; or use a CLIP image tower from timm: selfmask backbones "*clip*"',
        ) from error
