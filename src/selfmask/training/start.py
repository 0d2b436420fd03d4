"""Where a run begins, if not with all weights on: at what another run has learned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from .. import checked
from ..errors import NotAMaskFileError, RunDamagedError
from ..files import RunFile, remove_temporaries, write_atomically
from ..maskfile import inspect_mask_file
from ..masking import MaskedModel
from ..objectives import Objective
from ..preprocessing import Preprocessing
from .folder import checkpoint_file, read_checkpoint


@dataclasses.dataclass(frozen=True)
class Start:
    """A mask file and, from the folder of the run that wrote it, the scores behind it and its heads."""

    mask: Path
    checkpoint: str | None = None
    """The name of the checkpoint in the run folder, if there is one."""

    @staticmethod
    def of(where: str | Path) -> Start:
        """A run folder, or a mask file: of that alone only bits are known, and heads begin anew."""
        path = Path(where)
        folder, mask = (path, path / RunFile.MASK) if path.is_dir() else (path.parent, path)
        if not mask.is_file():
            raise NotAMaskFileError(
                f"there is no mask to start from in {path}" if path.is_dir() else f"{path} does not exist",
                expected="the folder of a finished run, or a mask file (.smn)",
                todo="check the path; if the run was interrupted, finish it with --resume",
            )
        if mask.name != RunFile.MASK or not (folder / RunFile.RESULT).is_file():
            return Start(mask)
        try:
            result = checked.mapping(checked.document(checked.content(folder / RunFile.RESULT), finite=False))
            name = "last" if "best_step" not in result else "best" if result["best_step"] else None
        except (OSError, ValueError) as error:
            raise RunDamagedError(f"{folder / RunFile.RESULT} cannot be read", found=error) from error
        return Start(mask, name if name and checkpoint_file(folder, name).is_file() else None)

    @property
    def preprocessing(self) -> Preprocessing | None:
        return inspect_mask_file(self.mask)[0].preprocessing

    @property
    def base_name(self) -> str | None:
        return inspect_mask_file(self.mask)[0].base_name

    def identity(self, model: nn.Module, size: int | None = None) -> str:
        """Of the mask; what cannot be begun with is refused."""
        return self.begin(model, size).pack().sha256[:16]

    def begin(self, model: nn.Module, size: int | None = None) -> MaskedModel:
        """The mask on its base, with its scores, ready to be trained on; for images of a size that was asked for."""
        masked = MaskedModel.from_pretrained(model, self.mask, is_trainable=True, size=size)
        if (state := self._state()) is not None:
            bits = masked.pack().sha256
            try:
                # Statistics are the mask's: those of the checkpoint may be from before they were estimated anew.
                scores = {key: value for key, value in state["model"].items() if key.startswith("scores.")}
                masked.load_state_dict(masked.state_dict() | scores)
                same = masked.pack().sha256 == bits
            except (KeyError, TypeError, AttributeError, RuntimeError):  # of other names, or other shapes
                same = False
            if not same:
                raise RunDamagedError(
                    f"{self.mask} and the checkpoint next to it belong to different runs",
                    todo="copy the mask file to a folder of its own, and give that copy",
                )
        return masked

    def heads(self, objective: Objective) -> bool:
        """Put the learned heads in place; False if there are none that fit."""
        state = self._state()
        if state is None:
            return False
        own = objective.state_dict()
        learned = {key: value for key, value in state["objective"].items() if key.partition(".")[0] in objective.heads}
        if not learned or any(key not in own or own[key].shape != value.shape for key, value in learned.items()):
            return False
        objective.load_state_dict(own | learned)
        return True

    def copy_to(self, folder: Path, model: nn.Module, preprocessing: Preprocessing) -> None:
        """All that a run needs to begin there, in another folder; the mask then says how images are prepared."""
        remove_temporaries(folder, folder / "checkpoints")  # of a process that was killed while it did this
        if self.checkpoint is not None:
            file = checkpoint_file(self.mask.parent, self.checkpoint)
            write_atomically(checkpoint_file(folder, self.checkpoint), file.read_bytes())
            write_atomically(folder / RunFile.RESULT, (self.mask.parent / RunFile.RESULT).read_bytes())
        # The mask last: where that is, all is.
        data = self.mask.read_bytes()
        if inspect_mask_file(data)[0].preprocessing is not None:
            write_atomically(folder / RunFile.MASK, data)
        else:
            masked = self.begin(model)
            masked.preprocessing = preprocessing
            masked.save_pretrained(folder / RunFile.MASK)

    def _state(self) -> dict[str, Any] | None:
        return None if self.checkpoint is None else read_checkpoint(self.mask.parent, self.checkpoint)
