"""MaskedModel: a frozen base, run with masked weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ConfigError
from ..maskfile import MaskSource
from ..preprocessing import of_file
from .calls import call_with
from .config import MaskConfig
from .direct import base_meant, unwatch
from .effective import unpack_mask_
from .expanding import Write, write_packed, write_scored
from .locks import BaseLock, exclusive
from .masks import DEFAULT
from .members import member_key
from .norms import can_be_anchored, momentum_of, norm_buffers, norm_layers
from .selection import select_parameters
from .storing import StoredMasks
from .tracing import keep_from_compiler
from .views import view_of


def get_masked_model(model: nn.Module, config: MaskConfig | None = None) -> MaskedModel:
    """Freeze `model`, and give each weight that `config` selects a trainable score.

    >>> masked = get_masked_model(model, MaskConfig(rule="threshold", select="auto"))
    >>> optimizer = torch.optim.SGD(masked.scores.parameters(), lr=50, momentum=0.9)
    """
    config = config or MaskConfig()
    with BaseLock(model):
        names = select_parameters(model, config)  # before anything is touched
        masked = MaskedModel(model)
        masked._add_scores(config, names)
        masked._freeze()
    return masked


class MaskedModel(StoredMasks):
    """A base model run with `W * M / alpha` in place of `W`. Build one with `get_masked_model` or `from_pretrained`.

    The base is frozen and never written to: effective weights and batch-norm statistics replace its own only during a
    call. `scores` are ordinary parameters. Masks loaded from files stay bit-packed. In eval mode, statistics are those
    that a file of the mask has (`maskfile/norm_codes.py`), so that what is measured is what is saved.

    Threads may share it: calls wait for each other. `view` gives modules that run in parallel.
    """

    # ---- building -------------------------------------------------------------------------------------------

    def __new__(cls, *_: Any, **__: Any) -> Self:
        _keep_from_compiler()
        return super().__new__(cls)

    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        path: MaskSource,
        *,
        name: str = DEFAULT,
        relative_to: MaskSource | None = None,
        is_trainable: bool = False,
        size: int | None = None,
    ) -> MaskedModel:
        """Apply the mask in a file to its base. With `is_trainable`, it gets scores, so that training can continue.

        `path` may also be the bytes of a file, an open file (`maskfile.OpenedMask`), or on the hub (see `load_mask`).
        `size` is that of the images, where it is to be another than the file says, or far larger than the base's own.
        """
        if is_trainable and name != DEFAULT:
            raise ConfigError("a trainable mask cannot have a name of its own", expected=DEFAULT, found=name)
        with BaseLock(model):
            masked = cls(model)
            masked.load_mask(path, name, relative_to=relative_to)
            masked.config = masked._config(name)
            learned = masked._packed[name]
            masked.base_name = learned.base_name or masked.base_name
            if (stored := learned.preprocessing or masked.preprocessing) is not None:
                masked.preprocessing = of_file(stored, masked.preprocessing, size)
            if is_trainable:
                masked._make_trainable()
            masked.set_mask(name)
            masked._freeze()
        return masked

    def _make_trainable(self) -> None:
        """Give the loaded default mask scores: as far above the threshold where on as below it where off."""
        mask = self._packed.pop(DEFAULT)
        config = MaskConfig.from_dict(mask.config)
        self._add_scores(config, list(mask.bits))
        distance = abs(config.s0 - config.mu) or 1.0
        with torch.no_grad():
            for name, score in self._named_scores().items():
                unpack_mask_(mask.bits[name], self._chosen.get(name), score)
                score.mul_(2 * distance).add_(config.mu - distance)
            for name, value in mask.norm.items():
                self._norm.get_buffer(member_key(name)).copy_(value)
        self._progress = mask.progress

    # ---- running --------------------------------------------------------------------------------------------

    @exclusive
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with base_meant():
            return self._run(self._replacements(), *args, **kwargs)

    @exclusive
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Any method of the base, by its name, with masked weights in place: `masked.call("forward_head", tokens)`."""
        if not callable(getattr(self.base, method, None)):
            raise ConfigError(
                f"the base has no method {method!r}",
                expected=f"a method of {type(self.base).__name__}",
                todo="timm's networks have forward_features, forward_head and forward_intermediates",
            )
        with base_meant():
            return call_with(self._replacements(), self.base, method, args, kwargs)

    def forward_features(self, *args: Any, **kwargs: Any) -> Any:
        """The base's features before pooling, as timm's networks give them: maps [B, C, H, W] or tokens [B, N, C]."""
        return self.call("forward_features", *args, **kwargs)

    def forward_intermediates(self, *args: Any, **kwargs: Any) -> Any:
        """The features of several depths, as timm's networks give them."""
        return self.call("forward_intermediates", *args, **kwargs)

    def _run(self, replacements: dict[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """The base, with other tensors in place while it runs: who calls this holds the lock."""
        return functional_call(self.base, replacements, args, kwargs, tie_weights=False)

    def _replacements(self) -> dict[str, Tensor]:
        """What the base gets instead of its own tensors for one call: effective weights and statistics."""
        active = self.active_mask
        own = active is not None and active == self._trained
        weights, statistics = dict[str, Tensor](), dict[str, Tensor]()
        if active is not None and torch.compiler.is_exporting():
            weights, statistics = self._originals.call(self, "_finished", self._known(active))
        elif active is not None:
            weights = self._effective_weights(self._known(active))
            statistics = {} if self.training else self._kept_statistics(active)
        if self.training:
            statistics = {} if active is None else self._statistics(active)
            self._rounded = None, {}  # layers write to them, and leave no trace of it
        if self.training and not (own and self._anchor is None):
            # Batch statistics may be used in train mode, but neither the base nor a loaded mask may change; and what
            # anchored layers see is not yet what they are to use.
            statistics = {name: value.clone() for name, value in (norm_buffers(self.base) | statistics).items()}
            if own and self._anchor is not None:
                statistics |= self._anchor.in_training(self.base)
        return {**weights, **statistics}

    def _effective_weights(self, active: str) -> dict[str, Tensor]:
        """W * M / alpha for every masked tensor, under all its names."""
        weights = self._weights(self._tied[active])
        scores = self._named_scores() if active == self._trained else {}
        tracked = {name: score for name, score in scores.items() if score.requires_grad and torch.is_grad_enabled()}
        # What is written through `score.data` without a new memory stays unseen, as it does to autograd.
        state = [(tensor.data_ptr(), tensor._version) for tensor in (*scores.values(), *weights.values())]
        key = (active, self._progress, state)
        outputs = self._effective.of(key, weights, tracked, self._writer(active), self.config.detach_alpha)
        return self._by_all_names(active, outputs)

    def _finished(self, active: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and statistics in eval mode, for a program: nothing is kept for later calls."""
        with torch.inference_mode(False), torch.no_grad():
            return self._expanded(active), self._rounded_statistics(active)

    def _expanded(self, active: str) -> dict[str, Tensor]:
        """The effective weights in memory of their own, which nobody will write to."""
        weights = self._weights(self._tied[active])
        blank = {name: torch.empty_like(weight) for name, weight in weights.items()}
        self._writer(active)(weights, blank)
        return self._by_all_names(active, blank)

    def _writer(self, active: str) -> Write:
        if active == self._trained:
            return partial(write_scored, self._named_scores(), self.config, self._progress, self._chosen)
        return partial(write_packed, self._packed[active])

    def _by_all_names(self, active: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {alias: tensors[name] for name, names in self._tied[active].items() for alias in names}

    @exclusive
    @torch.no_grad()
    def frozen(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the untouched base in eval mode, whatever mode the masked model is in."""
        was_training = self.training
        self.base.eval()
        try:
            with base_meant():
                return self.base(*args, **kwargs)
        finally:
            self.train(was_training)

    @exclusive
    def set_mask(self, name: str) -> None:
        """Make a mask the active one, for all threads, and expand it to full weights; all others stay bit-packed."""
        self._effective_weights(self._known(name))
        self._active = name

    @exclusive
    def view(self, name: str | None = None) -> nn.Module:
        """The base with a mask in place, by default the active one: a module in eval mode, like the base.

        Views run in parallel with each other and with everything else. A view is made once: it follows neither
        training nor later changes of the base's modules. It shares the memory of the weights that are not masked.
        """
        active = self.active_mask if name is None else name
        with torch.inference_mode(False), torch.no_grad():
            if active is None:
                return view_of(self.base, {}, {})
            return view_of(self.base, self._expanded(self._known(active)), self._kept_statistics(active))

    @exclusive
    def merge_and_unload(self) -> nn.Module:
        """A copy of the base with the active mask merged into its weights: a plain module, independent of selfmask."""
        dense = copy.deepcopy(self.base)
        unwatch(dense)
        active = self.active_mask
        weights = {} if active is None else self._effective_weights(self._known(active))
        replaced = weights | ({} if active is None else self._kept_statistics(active))
        members = dict(dense.named_parameters(remove_duplicate=False)) | dict(dense.named_buffers())
        with torch.no_grad():
            for name, value in replaced.items():
                members[name].copy_(value.detach())
        for name, parameter in dense.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(self._trainable[name])
        return dense

    # ---- statistics -----------------------------------------------------------------------------------------

    @exclusive
    def anchor(self, batches: Iterable[Tensor]) -> None:
        """For norm="anchored": record the base's batch-norm statistics on these batches, before training on them.

        Pass the same batches to `recalibrate`; for an untrained mask, it then returns to the statistics of the base.
        """
        if self._anchor is None:
            raise ConfigError("only norm='anchored' has an anchor", found=self.config.norm)
        self._anchor.measure(self.frozen, self.base, batches)

    @torch.no_grad()
    def recalibrate(self, batches: Iterable[Any]) -> None:
        """Re-estimate the active mask's batch-norm statistics as plain averages over `batches` of inputs.

        A batch is what the model takes: a tensor, or a tuple or list whose first item is one (labels are ignored).
        """
        with self.lock:
            active = self._require_active()
            if self._config(active).norm == "frozen":
                raise ConfigError(
                    "norm='frozen' keeps the batch-norm statistics unchanged",
                    todo="choose norm='adapt' or 'recalibrate'",
                )
            layers = [layer for layer in norm_layers(self.base).values() if hasattr(layer, "momentum")]
            if self._anchor is not None and not layers:
                return
            anchor = self._anchor if active == self._trained else None
            if anchor is not None:
                layers = [layer for layer in layers if can_be_anchored(layer)]
            statistics = norm_buffers(self.base) | self._statistics(active)
            current = {name: value.clone() for name, value in statistics.items()}
            own = {**current, **(anchor.in_training(self.base) if anchor else {})}
        seen = 0
        with self._choosing(active):
            for batch in batches:
                seen += 1  # the first batch replaces all that was, the second counts half, ...
                with self.lock, self._averaging(layers, 1 / seen):  # between batches, other threads may run
                    self._run({**self._replacements(), **own}, batch[0] if isinstance(batch, tuple | list) else batch)
        if not seen:
            raise ConfigError("recalibrate needs at least one batch", found="none")
        with self.lock:
            if anchor is not None:
                current |= anchor.in_evaluation(self.base, current)
            if active != self._trained:  # which is rounded whenever it is used
                current |= self._as_in_files(current)
            # Only now: an error on the way changes nothing.
            for name, value in self._statistics(self._known(active)).items():
                value.copy_(current[name])

    @contextmanager
    def _averaging(self, layers: list[nn.Module], share: float) -> Iterator[None]:
        """Within, only these layers are in train mode, and this is the share of a batch in running statistics."""
        was_training = self.training
        self.eval()
        try:
            for layer in layers:
                layer.train()
            with momentum_of(layers, share):
                yield
        finally:
            self.train(was_training)


@cache
def _keep_from_compiler() -> None:
    """Before there is a masked model, not on import: asking for it loads the compiler, which takes as long as torch."""
    keep_from_compiler(MaskedModel)
