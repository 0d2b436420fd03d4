"""MaskedModel: a frozen base, run with masked weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ConfigError, MaskWriteError, UnknownMaskError, WrongBaseError
from ..files import write_atomically
from ..maskfile import (
    Bits,
    Fingerprints,
    MaskSource,
    Members,
    PackedMask,
    PathLike,
    mask_file_bytes,
    pack_bits,
    read_mask_file,
    state_of,
    unpack_bits,
)
from ..preprocessing import Preprocessing, of_file
from .config import MaskConfig
from .effective import EffectiveWeight, apply_mask_, count_ones, inverse_alpha, unpack_mask_
from .layers import layers_of
from .locks import BaseLock, exclusive
from .members import member_key, tensor_name
from .norms import Anchor, can_be_anchored, momentum_of, norm_buffers, norm_layers, saved_statistics, set_norm_modes
from .rules import write_mask
from .scores import choose_fraction, initial_scores
from .selection import select_parameters, tied_names
from .views import view_of

DEFAULT = "default"

# What `using` and `disable_mask` chose, in this thread or task; None: no mask.
_chosen_here: ContextVar[Mapping[MaskedModel, str | None]] = ContextVar("chosen_here", default={})  # noqa: B039


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


class MaskedModel(nn.Module):
    """A base model run with `W * M / alpha` in place of `W`. Build one with `get_masked_model` or `from_pretrained`.

    The base is frozen and never written to: effective weights and batch-norm statistics replace its own only during a
    call. `scores` are ordinary parameters. Masks loaded from files stay bit-packed.

    Threads may share it: calls wait for each other. `view` gives modules that run in parallel.
    """

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
        self._packed: dict[str, PackedMask] = {}
        self._active: str | None = None
        self._fingerprints = Fingerprints()
        self._members = Members()
        self._converted = False  # to another type, since it was masked
        self._slots: dict[str, EffectiveWeight] = {}
        self._slots_key: object = None

    # ---- what is masked -------------------------------------------------------------------------------------

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

    # ---- running --------------------------------------------------------------------------------------------

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    @exclusive
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._replacements(), *args, **kwargs)

    def _run(self, replacements: dict[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """The base, with other tensors in place while it runs: who calls this holds the lock."""
        return functional_call(self.base, replacements, args, kwargs, tie_weights=False)

    @exclusive
    def train(self, mode: bool = True) -> MaskedModel:
        super().train(mode)
        if mode:
            set_norm_modes(self.base, self.config.norm)
        return self

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
            return view_of(self.base, self._expanded(self._known(active)), self._statistics(active))

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
    @torch.no_grad()
    def frozen(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the untouched base in eval mode, whatever mode the masked model is in."""
        was_training = self.training
        self.base.eval()
        try:
            return self.base(*args, **kwargs)
        finally:
            self.train(was_training)

    @exclusive
    def set_mask(self, name: str) -> None:
        """Make a mask the active one, for all threads, and expand it to full weights; all others stay bit-packed."""
        self._effective_weights(self._known(name))
        self._active = name

    @exclusive
    def delete_mask(self, name: str) -> None:
        """Remove a loaded mask. The active mask cannot be deleted: activate another first."""
        if name not in self._packed or name in (self._active, self.active_mask):
            raise UnknownMaskError(f"the mask {name!r} is active, or was never loaded", found=self.mask_names)
        del self._packed[name], self._tied[name]

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

    # ---- files ----------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        path: PathLike,
        *,
        relative_to: MaskSource | None = None,
        head: Mapping[str, Tensor] | None = None,
        notes: str = "",
    ) -> int:
        """Write the active mask to one `.smn` file, atomically, and return its size in bytes.

        With `relative_to`, a loaded mask or a file, only the difference from it is stored; loading needs it again.
        """
        data = self.mask_bytes(relative_to=relative_to, head=head, notes=notes)
        return write_atomically(Path(path), data, MaskWriteError)

    @exclusive
    def mask_bytes(
        self, *, relative_to: MaskSource | None = None, head: Mapping[str, Tensor] | None = None, notes: str = ""
    ) -> bytes:
        """The content of the file that `save_pretrained` writes, to be stored elsewhere."""
        mask = self.pack(head=head, notes=notes)
        reference = None if relative_to is None else self._resolve(relative_to)
        # A converted base no longer has the weights by whose size readers tell the classes of weights.
        parameters = {} if self._converted else self._weights(mask.sizes)
        return mask_file_bytes(mask, parameters, relative_to=reference)

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

        `path` may also be the bytes of a file, or an open file (`maskfile.OpenedMask`). `size` is that of the images,
        where it is to be another than the file says, or far larger than the base's own.
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

    @exclusive
    def load_mask(self, path: MaskSource, name: str, *, relative_to: MaskSource | None = None) -> None:
        """Load another mask, bit-packed; `set_mask(name)` then makes it the active one."""
        if name in self.mask_names:
            raise ConfigError(f"a mask named {name!r} is already loaded", todo="choose another name")
        mask = self._read(path, None if relative_to is None else self._resolve(relative_to))
        names = list(mask.sizes)
        known = [tied for tied in self._tied.values() if list(tied) == names]
        self._tied[name] = known[0] if known else tied_names(self.base, names)
        self._packed[name] = mask

    @exclusive
    def merge_and_unload(self) -> nn.Module:
        """A copy of the base with the active mask merged into its weights: a plain module, independent of selfmask."""
        dense = copy.deepcopy(self.base)
        replaced = {name: value.detach() for name, value in self._replacements().items()}
        members = dict(dense.named_parameters(remove_duplicate=False)) | dict(dense.named_buffers())
        with torch.no_grad():
            for name, value in replaced.items():
                members[name].copy_(value)
        for name, parameter in dense.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(self._trainable[name])
        return dense

    @exclusive
    def pack(self, *, head: Mapping[str, Tensor] | None = None, notes: str = "") -> PackedMask:
        """The active mask as bits and statistics, with all metadata of a mask file."""
        active = self._require_active()
        if active in self._packed:
            mask = self._packed[active]
            return mask if head is None and not notes else mask.replaced(head=head, notes=notes or None)
        bits, sizes = {}, {}
        for name, flat in self.masks():
            bits[name], sizes[name] = pack_bits(flat), flat.numel()
        weights = self._weights(bits)
        statistics = saved_statistics(self._statistics(active))
        own = saved_statistics(norm_buffers(self.base))
        frozen = self.config.norm == "frozen"
        state = state_of(self.base)
        return PackedMask(
            bits=bits,
            sizes=sizes,
            shapes={name: tuple(weight.shape) for name, weight in weights.items()},
            config=self.config.to_dict(),
            norm={} if frozen else {name: value.detach().clone() for name, value in statistics.items()},
            norm_fingerprint=self._fingerprints.of(own) if frozen and own else None,
            chosen={name: pack_bits(chosen.flatten()) for name, chosen in self._chosen.items()},
            head=dict(head or {}),
            base_name=self.base_name,
            base_fingerprint=self._fingerprints.of(state.stored),
            base_tensors=len(state.stored),
            tables_fingerprint=self._fingerprints.of(state.tables) if state.tables else None,
            fingerprint=self._fingerprints.of(weights),
            preprocessing=self.preprocessing,
            notes=notes,
            progress=self._progress,
        )

    # ---- how it works ---------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _replacements(self) -> dict[str, Tensor]:
        """What the base gets instead of its own tensors for one call: effective weights and statistics."""
        active = self.active_mask
        statistics = {} if active is None else self._statistics(self._known(active))
        own = active is not None and active == self._trained
        if self.training and not (own and self._anchor is None):
            # Batch statistics may be used in train mode, but neither the base nor a loaded mask may change; and what
            # anchored layers see is not yet what they are to use.
            statistics = {name: value.clone() for name, value in (norm_buffers(self.base) | statistics).items()}
            if own and self._anchor is not None:
                statistics |= self._anchor.in_training(self.base)
        return statistics if active is None else {**self._effective_weights(active), **statistics}

    def _statistics(self, active: str) -> dict[str, Tensor]:
        """The running statistics that belong to a mask."""
        if active == self._trained:
            return {tensor_name(key): value for key, value in self._norm.named_buffers()}
        return self._packed[active].norm

    def _effective_weights(self, active: str) -> dict[str, Tensor]:
        """W * M / alpha for every masked tensor, computed only when scores changed or a graph was used up."""
        tied = self._tied[active]
        weights = self._weights(tied)
        scores = self._named_scores() if active == self._trained else {}
        tracked = {name for name, score in scores.items() if score.requires_grad and torch.is_grad_enabled()}
        # What is written through `score.data` without a new memory stays unseen, as it does to autograd.
        state = [(tensor.data_ptr(), tensor._version) for tensor in (*scores.values(), *weights.values())]
        key = (active, self._progress, state)
        # Taken once: a backward in another thread may take them away at any time.
        outputs = {name: self._slots[name].output for name in tied} if key == self._slots_key else {}
        current = bool(outputs) and all(
            output is not None and (output.requires_grad or name not in tracked) for name, output in outputs.items()
        )
        if not current:
            outputs = {}  # what is held cannot be written over
            with torch.inference_mode(False), torch.no_grad():
                self._slots = {name: self._slots.get(name) or EffectiveWeight() for name in tied}
                blank = {name: self._slots[name].blank(weight) for name, weight in weights.items()}
                inverse = self._write_effective(active, weights, blank)
            for name, weight in weights.items():
                score = scores[name] if name in tracked else None
                outputs[name] = self._slots[name].finish(score, weight, inverse[name], self.config.detach_alpha)
            self._slots_key = key
        return {alias: outputs[name] for name, names in tied.items() for alias in names}  # type: ignore[misc]

    def _expanded(self, active: str) -> dict[str, Tensor]:
        """The same in memory of its own, which nobody will write to."""
        tied = self._tied[active]
        weights = self._weights(tied)
        blank = {name: torch.empty_like(weight) for name, weight in weights.items()}
        self._write_effective(active, weights, blank)
        return {alias: blank[name] for name, names in tied.items() for alias in names}

    def _write_effective(self, active: str, weights: dict[str, Tensor], blank: dict[str, Tensor]) -> dict[str, float]:
        """Write the effective weight of every tensor into the memory given; return 1 / alpha of each."""
        if active == self._trained:
            scores, counts = self._named_scores(), []
            for name, out in blank.items():
                write_mask(scores[name], self.config, self._progress, self._chosen.get(name), out)
                counts.append(count_ones(out))
            # One transfer for all counts: on a GPU each would wait for the device.
            number_on = torch.stack(counts).tolist()
            inverse = {name: inverse_alpha(on, blank[name].numel()) for name, on in zip(blank, number_on, strict=True)}
            for name, out in blank.items():
                apply_mask_(out, weights[name], inverse[name])
            return inverse
        mask, inverse = self._packed[active], {}
        for name, out in blank.items():
            weight, flags = weights[name], mask.chosen.get(name)
            chosen = None if flags is None else unpack_bits(flags, weight.numel()).view(weight.shape)
            inverse[name] = inverse_alpha(mask.active[name] + weight.numel() - mask.sizes[name], weight.numel())
            unpack_mask_(mask.bits[name], chosen, out)
            apply_mask_(out, weight, inverse[name])
        return inverse

    @torch.no_grad()
    def masks(self) -> Iterator[tuple[str, Tensor]]:
        """The trainable mask as zeros and ones, only of the weights that carry a score."""
        for name, score in self._named_scores().items():
            out = torch.empty_like(score, requires_grad=False)
            chosen = self._chosen.get(name)
            write_mask(score, self.config, self._progress, chosen, out)
            yield name, out.flatten() if chosen is None else out[chosen]

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

    def _freeze(self) -> None:
        """The last step of building: an error before leaves the user's model as it was."""
        if any(getattr(module, "grad_checkpointing", False) for module in self.base.modules()):
            raise ConfigError(
                "activation checkpointing inside the base would recompute activations with unmasked weights",
                todo="disable it: model.set_grad_checkpointing(False)",
            )
        self.base.requires_grad_(False)

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

    def _read(self, path: MaskSource, reference: PackedMask | None) -> PackedMask:
        if self._converted:
            raise WrongBaseError(
                "the base was converted to another dtype after it was masked",
                expected="the original weights, which masks are made for",
                found="rounded weights",
                todo="load all masks first, then convert with .to(dtype)",
            )
        return read_mask_file(
            path,
            parameters=dict(self.base.named_parameters(remove_duplicate=False)),
            buffers=saved_statistics(norm_buffers(self.base)),
            state=state_of(self.base),
            fingerprints=self._fingerprints,
            choose=self._choose,
            references=(self._resolve(name) for name in self.mask_names) if reference is None else [reference],
            members=self._members,
        )

    def _choose(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Bits]:
        """Packed flags of the weights that carry a bit under a config, for tensors where not all do."""
        parsed = MaskConfig.from_dict(config)
        choices = {name: choose_fraction(name, weight, parsed) for name, weight in self._weights(names).items()}
        return {name: pack_bits(chosen.flatten()) for name, chosen in choices.items() if chosen is not None}

    def _resolve(self, mask: MaskSource) -> PackedMask:
        """A mask given by the name it is loaded under, or by its file."""
        if not isinstance(mask, str) or mask not in self.mask_names:
            return self._read(mask, None)
        with self.using(mask):
            return self.pack()

    # ---- being an ordinary module ---------------------------------------------------------------------------

    @exclusive
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)

    @exclusive
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)

    @exclusive
    def _apply(self, fn: Any, recurse: bool = True) -> MaskedModel:
        """`.to()` and its kin. Scores stay float32 whatever the base becomes (see `initial_scores`)."""
        before = {key: score.data for key, score in self.scores.items()}
        hashed = self._hashed()
        if any(not value.is_meta and fn(value.new_zeros(1)).dtype != value.dtype for value in hashed.values()):
            self._fingerprints.of(hashed)  # of the weights that the masks are for, not of what they become
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
        self._slots, self._slots_key = {}, None
        return self

    def _hashed(self) -> dict[str, Tensor]:
        """All tensors of the base that a fingerprint may be taken of."""
        state = state_of(self.base)
        return {name: value.detach() for name, value in (state.stored | state.tables).items()}

    @exclusive
    def __deepcopy__(self, memo: dict[int, Any]) -> MaskedModel:
        memo[id(self)] = twin = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        # Graphs can be neither copied nor sent to another process; they are made anew on the next call.
        digests = self._fingerprints.known(self._hashed())
        own = {name: value for name, value in self.__dict__.items() if name != "lock"}
        return own | {"_slots": {}, "_slots_key": None, "_fingerprints": digests}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_fingerprints": Fingerprints()})  # type: ignore[no-untyped-call]
        self.lock = BaseLock(self.base)
        self._fingerprints.adopt(self._hashed(), state["_fingerprints"])
