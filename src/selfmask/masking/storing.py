"""Masks to files, and back onto their base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ConfigError, MaskWriteError, WrongBaseError
from ..files import RunFile, write_atomically
from ..hub import is_address
from ..maskfile import (
    Base,
    Bits,
    MaskSource,
    PackedMask,
    PathLike,
    mask_file_bytes,
    pack_bits,
    read_mask_file,
    shared,
    state_of,
)
from ..maskfile.container import MAX_HEADER
from .config import MaskConfig
from .locks import exclusive
from .masks import Masks
from .norms import norm_buffers, saved_statistics
from .scores import choose_fraction
from .selection import tied_names


class StoredMasks(Masks):
    """Masks that can be packed, written and loaded."""

    def save_pretrained(
        self,
        path: PathLike,
        *,
        relative_to: MaskSource | None = None,
        head: Mapping[str, Tensor] | None = None,
        notes: str = "",
        licence: str | None = None,
        data: str | None = None,
        trained_with: Any = None,
    ) -> int:
        """Write the active mask to one `.smn` file, atomically, and return its size in bytes.

        With `relative_to`, a loaded mask or a file, only the difference from it is stored; loading needs it again.
        `licence`, `data` and `trained_with` (text or small JSON) are for those who get the file: who may use it, what
        it was learned from, and how.
        """
        words = {"licence": licence, "data": data, "trained_with": trained_with}
        content = self.mask_bytes(relative_to=relative_to, head=head, notes=notes, **words)
        return write_atomically(Path(path), content, MaskWriteError)

    @exclusive
    def mask_bytes(
        self,
        *,
        relative_to: MaskSource | None = None,
        head: Mapping[str, Tensor] | None = None,
        notes: str = "",
        licence: str | None = None,
        data: str | None = None,
        trained_with: Any = None,
    ) -> bytes:
        """The content of the file that `save_pretrained` writes, to be stored elsewhere."""
        mask = self.pack(head=head, notes=notes)
        words = shared(mask.extensions, licence=licence, data=data, trained_with=trained_with)
        mask = mask.replaced(extensions=words)
        reference = None if relative_to is None else self._resolve(relative_to)
        return self.file_bytes(mask, relative_to=reference)

    @exclusive
    def file_bytes(self, mask: PackedMask, *, relative_to: PackedMask | None = None) -> bytes:
        """The content of the file of any mask of this base: of `read_mask`, or made by hand."""
        if self._converted:  # it no longer has the weights and statistics that readers decode with
            return mask_file_bytes(mask, {}, relative_to=relative_to)
        own = saved_statistics(norm_buffers(self.base))
        return mask_file_bytes(mask, self._weights(mask.sizes), own, relative_to=relative_to)

    @exclusive
    def load_mask(self, path: MaskSource, name: str, *, relative_to: MaskSource | None = None) -> None:
        """Load another mask, bit-packed; `set_mask(name)` then makes it the active one.

        `path` may also be on the hub: hf://OWNER/NAME, hf://OWNER/NAME@REVISION, hf://OWNER/NAME@REVISION/FILE. What
        lies on this machine under the same name comes first.
        """
        if name in self.mask_names:
            raise ConfigError(f"a mask named {name!r} is already loaded", todo="choose another name")
        mask = self._read(path, None if relative_to is None else self._resolve(relative_to))
        names = list(mask.sizes)
        known = [tied for tied in self._tied.values() if list(tied) == names]
        self._tied[name] = known[0] if known else tied_names(self.base, names)
        self._packed[name] = mask

    def read_mask(self, path: MaskSource) -> PackedMask:
        """Read a mask of this base without loading it: for whoever keeps masks by himself. Threads need not wait."""
        return self._read(path, None)

    def as_base(self) -> Base:
        """What masks of this base are read for, and packed with (`maskfile.packs`)."""
        self._check_unconverted()
        return Base(
            parameters=dict(self.base.named_parameters(remove_duplicate=False)),
            buffers=saved_statistics(norm_buffers(self.base)),
            state=state_of(self.base),
            fingerprints=self._fingerprints,
            choose=self._choose,
        )

    def push_to_hub(
        self,
        repo: str,
        *,
        license: str | None = None,
        data: str | None = None,
        trained_with: Any = None,
        private: bool = True,
        head: Mapping[str, Tensor] | None = None,
        result: Mapping[str, Any] | None = None,
        message: str = "Add a mask",
        revision: str | None = None,
    ) -> str:
        """Put the active mask and a model card into a repository of the Hugging Face hub, in one commit.

        >>> masked.push_to_hub("me/birds", license="cc-by-4.0", data="1,000 photos of birds, my own")
        'hf://me/birds@3f1c...'

        The result is its address with the commit, which `load_mask` and `from_pretrained` take. `result` are the
        numbers of a run (`AdaptResult.result`), for the card; `revision` is a branch. The repository is made if there
        is none; whether it is `private` is decided then.
        """
        from ..hub.card import BaseFacts, mask_card
        from ..hub.transfer import push

        words = {"licence": license, "data": data, "trained_with": trained_with}
        content = self.mask_bytes(head=head, **words)
        card = mask_card(repo, content, base=BaseFacts.of_model(self.base), result=result)
        files = {"README.md": card.encode(), RunFile.MASK: content}
        return str(push(repo, files, private=private, message=message, revision=revision))

    @property
    @exclusive
    def origin(self) -> str | None:
        """Where on the hub the active mask came from, with the commit; None if it came from elsewhere."""
        mask = self._packed.get(self._require_active())
        return None if mask is None else mask.origin

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
        statistics = saved_statistics(self._kept_statistics(active))
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

    def _read(self, path: MaskSource, reference: PackedMask | None) -> PackedMask:
        base, origin = self.as_base(), None
        if is_address(path):
            from ..hub.transfer import fetch

            # No part of a mask file is larger than the base in float32 (docs/format.md).
            found = fetch(
                path, most=MAX_HEADER + 16 * sum(value.numel() for value in state_of(self.base).stored.values())
            )
            path, origin = found.path, str(found.address)
        mask = read_mask_file(
            path,
            **base._asdict(),
            references=(self._resolve(name) for name in self.mask_names) if reference is None else [reference],
            members=self._members,
        )
        return mask.replaced(origin=origin)

    def _check_unconverted(self) -> None:
        if self._converted:
            raise WrongBaseError(
                "the base was converted to another dtype after it was masked",
                expected="the original weights, which masks are made for",
                found="rounded weights",
                todo="load all masks first, then convert with .to(dtype)",
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
