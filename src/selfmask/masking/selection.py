"""Which parameters of a model carry a mask, for any architecture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import combinations

from torch import Tensor, nn

from ..errors import SelectionError
from .config import MaskConfig

# Where model families keep their repeated blocks: ResNet layer1, RegNet s1, and lists counted from 0
# (ConvNeXt stages, Swin and CLIP layers, EfficientNet and ViT blocks, open_clip resblocks).
_STAGE_FROM_1 = re.compile(r"(?:^|\.)(?:layer|s)(\d+)\.")
_STAGE_FROM_0 = re.compile(r"(?:^|\.)(?:stages|layers?|blocks|resblocks|features)\.(\d+)\.")
_STAGES = re.compile(r"stages:(\d+)-(\d+)")
_CLASSIFIERS = {"fc", "head", "heads", "head_dist", "classifier", "last_linear"}
_CONVOLUTIONS = nn.modules.conv._ConvNd
# bias_k and bias_v of nn.MultiheadAttention are learned tokens, not weights.
_ATTENTION = {"in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
_EMBEDDING = re.compile(r"(?:^|_)embed(?:ding)?s?\d*$")  # patch_embed, embeddings; not embedder
_NAMED = ("auto", "late", "paper", "paper-resnet", "paper-vit", "reference-vit", "all")
_PROJECTION = re.compile(r"(?:^|\.)(?:proj|visual_projection\.weight)$")  # of CLIP, in open_clip and in transformers
_EARLY = 4  # the first of so many parts of the layers is early


def select_parameters(model: nn.Module, config: MaskConfig) -> list[str]:
    """The names of the parameters to mask; of tied weights the first name only, they are masked once."""
    names = _select(model, config)
    names = [name for name in names if not _matches(name, config.exclude)]
    if not names:
        raise SelectionError(
            f"nothing to mask in {type(model).__name__}",
            expected="at least one selected parameter",
            found=f"select={config.select!r}, exclude={list(config.exclude)!r}",
            todo='pass select="all", or glob patterns of names in model.named_parameters()',
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if odd := [name for name in names if not parameters[name].is_floating_point()]:
        raise SelectionError(
            "only floating-point parameters can be masked",
            found=f"{odd[0]} of type {parameters[odd[0]].dtype}" + (f" and {len(odd) - 1} more" if odd[1:] else ""),
            todo="mask the model before quantising it, or name these parameters in exclude=[...]",
        )
    return list(tied_names(model, names))


def stage_of(name: str) -> int:
    """The stage a parameter lies in, counted from 1; 0 for the stem and whatever else is in no stage."""
    if match := _STAGE_FROM_1.search(name):
        return int(match[1])
    if match := _STAGE_FROM_0.search(name):
        return int(match[1]) + 1
    return 0


def _select(model: nn.Module, config: MaskConfig) -> list[str]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    select = config.select
    if not isinstance(select, str):
        for pattern in select:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise SelectionError(
                    f"the pattern {pattern!r} matches no parameter of {type(model).__name__}",
                    expected=f"names such as {', '.join(names[:3])}",
                    todo="list the names with model.named_parameters(); * matches any text, including dots",
                )
        return [name for name in names if _matches(name, select)]
    if select == "all":
        return names
    if select == "auto":
        return _auto(model)
    if select == "late":
        return _late(model)
    if select == "paper":
        if _is_resnet(names):
            return _paper_resnet(model)
        return (_has_attention(model) and _paper_vit(model)) or _auto(model)
    if select == "paper-resnet":
        return _paper_resnet(model)
    if select == "paper-vit":
        return _paper_vit(model)
    if select == "reference-vit":
        return [*_paper_vit(model), *(name for name in names if _PROJECTION.search(name))]
    if match := _STAGES.fullmatch(select):
        first, last = int(match[1]), int(match[2])
        # The paper's selective masking is of ResNets, where downsample norms count too.
        candidates = _paper_resnet(model) if _is_resnet(names) else _auto(model)
        return [name for name in candidates if first <= stage_of(name) <= last]
    raise SelectionError(
        "unknown selection",
        expected=", ".join(_NAMED) + ', "stages:A-B", or a list of glob patterns',
        found=repr(select),
    )


def _is_resnet(names: Sequence[str]) -> bool:
    return any(re.search(r"(?:^|\.)layer\d+\..*\.downsample\.", name) for name in names)


def _has_attention(model: nn.Module) -> bool:
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def _auto(model: nn.Module) -> list[str]:
    """Weights and biases of convolutions, linear layers and attention; no norms, embeddings or classifier."""
    skipped = _classifier_prefixes(model)
    found: dict[str, None] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if any(prefix == skip or prefix.startswith(skip + ".") for skip in skipped):
            continue
        if _is_patch_embedding(model, prefix, module):
            continue
        if isinstance(module, _CONVOLUTIONS | nn.Linear) or type(module).__name__ == "Conv1D":
            wanted = {"weight", "bias"}
        elif isinstance(module, nn.MultiheadAttention):
            wanted = _ATTENTION
        else:
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if name.rpartition(".")[2] in wanted and parameter.is_floating_point():
                found[name] = None
    return list(found)


def _late(model: nn.Module) -> list[str]:
    """What `auto` selects but for the first quarter of the layers: a backward pass ends where nothing learns."""
    names = _auto(model)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    early = set(layers[: len(layers) // _EARLY])
    return [name for name in names if name.rpartition(".")[0] not in early]


def _paper_resnet(model: nn.Module) -> list[str]:
    """All convolutions, and everything in a downsample branch: the paper's 23,462,592 include its norms."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _CONVOLUTIONS) or "downsample" in prefix.split("."):
            found += [name for name, _ in module.named_parameters(prefix, recurse=False)]
    return found


def _paper_vit(model: nn.Module) -> list[str]:
    """Attention projections and MLPs live in the blocks; the patch embedding and output projection do not."""
    return [name for name in _auto(model) if stage_of(name) > 0]


def _classifier_prefixes(model: nn.Module) -> set[str]:
    """The classifier goes with the labels it was trained for: timm tells where it is, else its usual names."""
    skipped = {name for name, _ in model.named_children() if name in _CLASSIFIERS}
    for owner in model.modules():  # a timm model may be wrapped in another
        get_classifier = getattr(owner, "get_classifier", None)
        if callable(get_classifier):
            parts = get_classifier()
            heads = {id(part) for part in (parts if isinstance(parts, tuple | list) else (parts,))}
            skipped |= {name for name, module in model.named_modules() if id(module) in heads}
    return skipped


def _is_patch_embedding(model: nn.Module, prefix: str, module: nn.Module) -> bool:
    """A patch embedding is an embedding: by its name, or a convolution that stands beside position tokens."""
    path = prefix.split(".")
    if any(_EMBEDDING.search(part) for part in path):
        return True
    parent = model.get_submodule(".".join(path[:-1]))
    beside = [name for name, _ in parent.named_parameters(recurse=False)]
    return isinstance(module, _CONVOLUTIONS) and any("embed" in name or "token" in name for name in beside)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tied_names(model: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """For each tensor among `names`, all places it has in the model; the first name given speaks for all.

    A place is a member of a module, under one name: a module may itself be in several places, and replacing its
    member twice would not be undone (which is also why `functional_call` must not look for ties by itself).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places: dict[object, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            places.setdefault(_view_of(parameter), []).append(name)
    first = {_view_of(parameters[name]): name for name in reversed(names)}
    groups = {first[view]: places[view] for view in dict.fromkeys(_view_of(parameters[name]) for name in names)}
    _refuse_partial_overlap(groups, parameters)
    return groups


def _view_of(tensor: Tensor) -> object:
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _refuse_partial_overlap(groups: dict[str, list[str]], parameters: dict[str, nn.Parameter]) -> None:
    """Two different views of one memory would need one mask in two shapes; say so instead of guessing."""
    selected = {_view_of(parameters[name]) for name in groups}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    representatives = {_view_of(p): name for name, p in reversed(parameters.items())}
    for name in representatives.values():
        tensor = parameters[name]
        if tensor.is_meta or tensor.numel() == 0:
            continue
        start = tensor.data_ptr()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storage = tensor.untyped_storage().data_ptr()
        spans.setdefault(storage, []).append((start, start + extent * tensor.element_size(), name))
    for storage_spans in spans.values():
        storage_spans.sort()
        for (_, end, first), (start, _, second) in combinations(storage_spans, 2):
            if start < end and not selected.isdisjoint(_view_of(parameters[name]) for name in (first, second)):
                raise SelectionError(
                    f"{first} and {second} are different views of the same memory",
                    expected="tied weights of one shape (masked once), or separate tensors",
                    todo=f"untie them, or leave them unmasked with exclude=[{first!r}, {second!r}]",
                )
