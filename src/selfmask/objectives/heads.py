"""Heads: what turns vectors into classes. They travel with a mask, class names included."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checked
from ..errors import HeadError
from ..masking import MaskConfig, MaskedModel, get_masked_model

_MAX_CLASSES = 1_000_000


class Head(nn.Module, ABC):
    """Maps vectors [n, features] to one number a class [n, classes]; `classes` says what they are called."""

    classes: list[str]

    @abstractmethod
    def forward(self, vectors: Tensor) -> Tensor: ...

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps of it, in 16 bits a number; `head_of` makes the head anew."""

    def ranked(self, vectors: Tensor, count: int = 5) -> Tensor:
        """The numbers of the likeliest classes of each vector, likeliest first."""
        with torch.inference_mode():
            ranked: Tensor = self(vectors).topk(min(count, len(self.classes)), dim=1).indices
        return ranked.clone()


class LinearHead(Head):
    """`weight @ v + bias`, of vectors of length 1 if `normalised`: it then starts well from a linear probe."""

    def __init__(self, features: int, classes: Sequence[str], *, normalised: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.classes, self.normalised = list(classes), normalised
        self.linear: nn.Module = seeded_linear(features, len(classes), seed)

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.linear(F.normalize(vectors, dim=1) if self.normalised else vectors)
        return logits

    def start_from(self, weight: Tensor, bias: Tensor) -> None:
        """Begin with these, those of a linear probe say, instead of at random."""
        with torch.no_grad():
            self.linear.weight.copy_(weight)  # type: ignore[operator]
            self.linear.bias.copy_(bias)  # type: ignore[operator]

    def tensors(self) -> dict[str, Tensor]:
        weight, bias = self.linear.weight, self.linear.bias
        return _tensors(self.classes, weight=weight, bias=bias, normalised=torch.tensor(self.normalised))


class MaskedHead(LinearHead):
    """A frozen random linear head with a mask of its own, as in the paper's released command."""

    def __init__(self, features: int, classes: Sequence[str], *, mask: MaskConfig, seed: int = 0) -> None:
        super().__init__(features, classes, seed=seed)
        own = MaskConfig(rule=mask.rule, mu=mask.mu, s0=mask.s0, active_share=mask.active_share, select=("weight",))
        self.linear = get_masked_model(self.linear, own)

    @property
    def masked(self) -> MaskedModel:
        assert isinstance(self.linear, MaskedModel)
        return self.linear

    def tensors(self) -> dict[str, Tensor]:
        merged = self.masked.merge_and_unload()
        weight, bias = merged.weight, merged.bias
        return _tensors(self.classes, weight=weight, bias=bias, normalised=torch.tensor(self.normalised))


class TextHead(Head):
    """CLIP's: the cosine of a vector to the text of each class, times a frozen scale. Nothing in it is trained."""

    def __init__(self, text: Tensor, scale: float, classes: Sequence[str]) -> None:
        super().__init__()
        if text.ndim != 2 or len(text) != len(classes):
            raise HeadError(
                "the text embeddings do not match the classes", expected=len(classes), found=list(text.shape)
            )
        self.classes, self.scale = list(classes), scale
        self.register_buffer("text", F.normalize(text.float(), dim=1))
        self.text: Tensor

    def forward(self, vectors: Tensor) -> Tensor:
        return self.scale * F.normalize(vectors, dim=1) @ self.text.T

    def tensors(self) -> dict[str, Tensor]:
        return _tensors(self.classes, text=self.text, scale=torch.tensor(self.scale))


def seeded_linear(features: int, classes: int, seed: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(features, classes)


def head_of(tensors: Mapping[str, Tensor]) -> Head:
    """The head that a file keeps; a file that holds none, or a broken one, is a `HeadError`."""
    if not tensors:
        raise HeadError("there is no head in this file", todo="train one with `selfmask train`")
    try:
        classes = checked.items(checked.document(bytes(tensors["classes"].tolist())), checked.text, most=_MAX_CLASSES)
        numbers = {name: value.float() for name, value in tensors.items() if name != "classes"}
        if not all(bool(value.isfinite().all()) for value in numbers.values()):
            raise ValueError("values that are not finite")
        if "text" in numbers:
            return TextHead(numbers["text"], float(numbers["scale"]), classes).eval()
        weight, bias = numbers["weight"], numbers["bias"]
        if weight.ndim != 2 or bias.shape != weight.shape[:1] or len(weight) != len(classes):
            raise ValueError(f"{len(classes)} classes, weights {list(weight.shape)} and biases {list(bias.shape)}")
        head = LinearHead(weight.shape[1], classes, normalised=bool(numbers["normalised"]))
        head.start_from(weight, bias)
        return head.eval()
    except HeadError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise HeadError(
            "the head in this file is not valid",
            expected="class names with a linear or a text head, as written by `selfmask train`",
            found=f"{type(error).__name__}: {error}",
            todo="use the mask without its head, or train it again",
        ) from error


def _tensors(classes: list[str], **numbers: Tensor | nn.Module) -> dict[str, Tensor]:
    names = torch.tensor(list(json.dumps(classes).encode()), dtype=torch.uint8)
    kept = {name: value.detach().cpu() for name, value in numbers.items() if isinstance(value, Tensor)}
    # Half of float32's bytes: the rounding is far below what training leaves undecided.
    half = {name: value.half() for name, value in kept.items() if value.is_floating_point() and value.ndim}
    return {"classes": names, **kept, **half}
