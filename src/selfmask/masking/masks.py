"""The masks on a frozen base: scores and loaded masks, their statistics, and which of them is active."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import ConfigError, UnknownMaskError
from ..maskfile import Fingerprints, Members, PackedMask, state_of
from ..maskfile.norm_codes import rounded
from ..preprocessing import Preprocessing
from .config import MaskConfig
from .direct import watch
from .expanding import EffectiveWeights
from .layers import layers_of
from .locks import BaseLock, exclusive
from .members import member_key, tensor_name
from .norms import Anchor, norm_buffers, norm_layers, saved_statistics, set_norm_modes
from .rules import write_mask
from .scores import choose_fraction, initial_scores
from .selection import tied_names
from .tracing import Originals

DEFAULT = "default"

# What `using` and `disable_mask` chose, in this thread or task; None: no mask.
_chosen_here: ContextVar[Mapping[Masks, str | None]] = ContextVar("chosen_here", default={})  # noqa: B039


class Masks(nn.Module):
    """A base, the masks on it, and what belongs to each; an ordinary module, with its types, copies and pickles."""

    base: nn.Module
    scores: nn.ParameterDict
    lock: BaseLock
    """Held by every call. Hold it to do several things as one, or to use `base` itself while other threads run."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.lock = BaseLock(base)
        self.scores = nn.ParameterDict()
        self.config = MaskConfig()
        self.base_name, self.preprocessing = Preprocessing.of_model(base)
        self._trainable = {name: p.requires_grad for name, p in base.named_parameters(remove_duplicate=False)}
        self.training = base.training
        self._tied: dict[str, dict[str, list[str]]] = {}  # per mask: tensor -> all its names in the base
        self._chosen: dict[str, Tensor] = {}
        self._progress = 0.0
        self._anchor: Anchor | None = None
        self._norm = nn.Module()  # our copy of the base's running statistics; they move with the scores
        self._rounded: tuple[object, dict[str, Tensor]] = (None, {})  # what they were rounded from, and to
        self._packed: dict[str, PackedMask] = {}
        self._active: str | None = None
        self._fingerprints = Fingerprints()
        self._members = Members()
        self._converted = False  # to another type, since it was masked
        self._effective = EffectiveWeights()
        self._originals = Originals()

    # ---- what is masked, and by which mask -------------------------------------------------------------------

    @property
    def mask_names(self) -> list[str]:
        """The masks on this base: the trainable one, if any, and the loaded ones."""
        return ([DEFAULT] if len(self.scores) else []) + list(self._packed)

    @property
    def active_mask(self) -> str | None:
        """The name of the active mask, as this thread sees it, or None if masks are disabled."""
        return _chosen_here.get().get(self, self._active)

    @property
    @exclusive
    def num_masked(self) -> int:
        """The number of weights that carry a score (or, in a loaded mask, a bit) in the active mask."""
        if (active := self._require_active()) in self._packed:
            return sum(self._packed[active].sizes.values())
        return sum(
            int(self._chosen[name].sum()) if name in self._chosen else score.numel()
            for name, score in self._named_scores().items()
        )

    def layers(self) -> list[list[nn.Parameter]]:
        """The scores, in groups that make up one layer each, as `layers_of` tells."""
        scores = self._named_scores()
        return [[scores[name] for name in names] for names in layers_of(scores)]

    @exclusive
    def sparsity(self) -> dict[str, float]:
        """The share of active weights among those masked, per tensor and in "total" (the paper's "sparsity")."""
        active = self._require_active()
        if active in self._packed:
            mask = self._packed[active]
            counts = {name: (mask.active[name], size) for name, size in mask.sizes.items()}
        else:
            counts = {name: (int(flat.count_nonzero()), flat.numel()) for name, flat in self.masks()}
        on, size = (sum(column) for column in zip(*counts.values(), strict=True))
        shares = {name: count / n if n else 1.0 for name, (count, n) in counts.items()}
        return shares | {"total": on / size if size else 1.0}

    @property
    def progress(self) -> float:
        """The progress of training, from 0 to 1; the training loop sets it, and the rule progressive_topk uses it."""
        return self._progress

    @progress.setter
    def progress(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise ConfigError("progress is out of range", expected="0 to 1", found=value)
        self._progress = float(value)

    @property
    def fingerprints(self) -> Fingerprints:
        """Hashes of the base's tensors; those computed to check masks are reused."""
        return Fingerprints() if self._converted else self._fingerprints

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Within this context, and only in the thread or task that entered it, this mask is the active one."""
        with self._choosing(self._known(name)):
            yield

    @contextmanager
    def disable_mask(self) -> Iterator[None]:
        """Within this context, the model is the untouched base, including its own batch-norm statistics.

        Only in the thread or task that entered it: others keep their mask.
        """
        with self._choosing(None):
            yield

    @contextmanager
    def _choosing(self, name: str | None) -> Iterator[None]:
        token = _chosen_here.set({**_chosen_here.get(), self: name})
        try:
            yield
        finally:
            _chosen_here.reset(token)

    @exclusive
    def delete_mask(self, name: str) -> None:
        """Remove a loaded mask. The active mask cannot be deleted: activate another first."""
        if name not in self._packed or name in (self._active, self.active_mask):
            raise UnknownMaskError(f"the mask {name!r} is active, or was never loaded", found=self.mask_names)
        del self._packed[name], self._tied[name]
        self._effective.forget()

    # ---- the tensors of a mask ------------------------------------------------------------------------------

    @torch.no_grad()
    def masks(self) -> Iterator[tuple[str, Tensor]]:
        """The trainable mask as zeros and ones, only of the weights that carry a score."""
        for name, score in self._named_scores().items():
            out = torch.empty_like(score, requires_grad=False)
            chosen = self._chosen.get(name)
            write_mask(score, self.config, self._progress, chosen, out)
            yield name, out.flatten() if chosen is None else out[chosen]

    def _statistics(self, active: str) -> dict[str, Tensor]:
        """The running statistics that belong to a mask."""
        if active == self._trained:
            return {tensor_name(key): value for key, value in self._norm.named_buffers()}
        return self._packed[active].norm

    def _kept_statistics(self, active: str) -> dict[str, Tensor]:
        """The statistics that a file of a mask has, computed only when those of the trainable one changed."""
        statistics = self._statistics(active)
        if active != self._trained:
            return statistics
        tensors = (*statistics.values(), *norm_buffers(self.base).values())
        key = self._converted, [(tensor.data_ptr(), tensor._version) for tensor in tensors]
        if self._rounded[0] != key:
            self._rounded = key, self._rounded_statistics(active)
        return self._rounded[1]

    def _rounded_statistics(self, active: str) -> dict[str, Tensor]:
        """The same, computed anew."""
        statistics = self._statistics(active)
        with torch.inference_mode(False), torch.no_grad():
            return statistics | (self._as_in_files(statistics) if active == self._trained else {})

    def _as_in_files(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means and variances, rounded; on a base that was converted, files have them as they are."""
        own = saved_statistics(norm_buffers(self.base))
        return {} if self._converted else rounded(saved_statistics(statistics), own)

    def _require_active(self) -> str:
        if (active := self.active_mask) is None:
            raise ConfigError("no mask is active", todo="leave disable_mask(), or call set_mask(name)")
        return self._known(active)

    def _known(self, name: str) -> str:
        if name not in self.mask_names:
            raise UnknownMaskError(
                f"no mask named {name!r} is loaded",
                expected=", ".join(self.mask_names) or "no masks are loaded",
                todo="load it first: masked.load_mask(path, name=...)",
            )
        return name

    def _config(self, name: str) -> MaskConfig:
        return self.config if name == self._trained else MaskConfig.from_dict(self._packed[name].config)

    @property
    def _trained(self) -> str | None:
        """The name of the trainable mask, if there is one."""
        return DEFAULT if len(self.scores) else None

    def _named_scores(self) -> dict[str, nn.Parameter]:
        return {tensor_name(key): score for key, score in self.scores.items()}

    def _weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        modules = dict(self.base.named_modules(remove_duplicate=False))  # one walk is faster than one for each name
        owned = ((name, *name.rpartition(".")[::2]) for name in names)
        return {name: getattr(modules[owner], leaf).detach() for name, owner, leaf in owned}

    # ---- building -------------------------------------------------------------------------------------------

    def _freeze(self) -> None:
        """The last step of building: an error before leaves the user's model as it was."""
        if any(getattr(module, "grad_checkpointing", False) for module in self.base.modules()):
            raise ConfigError(
                "activation checkpointing inside the base would recompute activations with unmasked weights",
                todo="disable it: model.set_grad_checkpointing(False)",
            )
        self.base.requires_grad_(False)
        self._watch()

    def _watch(self) -> None:
        watch(self, self.base, next(iter(self._tied.values()), ()))

    def _add_scores(self, config: MaskConfig, names: list[str]) -> None:
        of_norms = {f"{name}.{kind}" for name in norm_layers(self.base) for kind in ("weight", "bias")}
        if config.norm == "anchored" and (masked_norms := of_norms & set(names)):
            raise ConfigError(
                "norm='anchored' needs unmasked norm layers",
                found=f"a mask on {min(masked_norms)}",
                todo="use select='auto', or exclude the norm layers",
            )
        self.config = config
        self._tied[DEFAULT] = tied_names(self.base, names)
        generator = torch.Generator().manual_seed(config.seed)
        for name, weight in self._weights(names).items():
            self.scores[member_key(name)] = nn.Parameter(initial_scores(weight, config, generator))
            chosen = choose_fraction(name, weight, config)
            if chosen is not None:
                self._chosen[name] = chosen
        for name, value in norm_buffers(self.base).items():
            self._norm.register_buffer(member_key(name), value.detach().clone())
        self._active = DEFAULT
        self._anchor = Anchor(self.base) if config.norm == "anchored" else None
        if config.norm in ("frozen", "anchored"):
            self.train(self.training)

    # ---- being an ordinary module ---------------------------------------------------------------------------

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        if not torch.compiler.is_compiling():
            self._originals.note(self)
        yield from super().named_modules(*args, **kwargs)

    @exclusive
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if mode:
            set_norm_modes(self.base, self.config.norm)
        return self

    @exclusive
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)

    @exclusive
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)

    @exclusive
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """`.to()` and its kin. Scores stay float32 whatever the base becomes (see `initial_scores`)."""
        before = {key: score.data for key, score in self.scores.items()}
        hashed = self._hashed()
        if any(not value.is_meta and fn(value.new_zeros(1)).dtype != value.dtype for value in hashed.values()):
            self._fingerprints.of(hashed)  # of the weights that the masks are for, not of what they become
            with torch.no_grad():
                for name, value in (self._kept_statistics(DEFAULT) if self._trained else {}).items():
                    self._norm.get_buffer(member_key(name)).copy_(value)
            self._converted = True
        digests = self._fingerprints.known(hashed)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fingerprints.adopt(self._hashed(), digests)
        for key, score in self.scores.items():
            if score.dtype != torch.float32:
                gradient, score.grad = score.grad, None
                score.data = before[key].to(score.device)
                score.grad = None if gradient is None else gradient.float()
        scores = self._named_scores()
        self._chosen = {name: chosen.to(scores[name].device) for name, chosen in self._chosen.items()}
        for mask in self._packed.values():
            mask.norm = {name: fn(value) for name, value in mask.norm.items()}
        self._effective = EffectiveWeights()
        return self

    def _hashed(self) -> dict[str, Tensor]:
        """All tensors of the base that a fingerprint may be taken of."""
        state = state_of(self.base)
        return {name: value.detach() for name, value in (state.stored | state.tables).items()}

    @exclusive
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        # Graphs can be neither copied nor sent to another process; they are made anew on the next call.
        digests = self._fingerprints.known(self._hashed())
        own = {name: value for name, value in self.__dict__.items() if name != "lock"}
        empty = {"_effective": EffectiveWeights(), "_rounded": (None, {}), "_originals": Originals()}
        return own | empty | {"_fingerprints": digests}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_fingerprints": Fingerprints()})  # type: ignore[no-untyped-call]
        self.lock = BaseLock(self.base)
        self._fingerprints.adopt(self._hashed(), state["_fingerprints"])
        self._watch()
