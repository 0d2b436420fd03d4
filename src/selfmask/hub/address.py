"""Names of what is on the hub: hf://OWNER/NAME[@REVISION][/FILE]."""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not in __all__

from ..errors import HubAddressError
from . import PREFIX

# A revision is a branch, a tag or a commit; refs/pr/N is the only kind that the hub itself names with slashes.
_FORM = re.compile(r"([^@/]+/[^@/]+)(?:@(refs/(?:pr|convert)/[^/@]+|[^/@]+))?(?:/([^@]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclasses.dataclass(frozen=True)
class HubAddress:
    """A repository of the hub, a revision of it, and a file in it, as far as they are said."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """With or without the hf:// in front."""
        found = _FORM.fullmatch(text.removeprefix(PREFIX))
        try:
            if found is None or not all(part.strip(".") for part in (found[3] or "x").split("/")):
                raise ValueError(text)
            validate_repo_id(found[1])
        except (ValueError, HFValidationError) as error:
            raise HubAddressError(
                "this names nothing on the hub",
                expected="hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME@REVISION/FILE",
                found=text[:200],
                todo="check the name",
            ) from error
        return cls(*found.groups())

    @property
    def pinned(self) -> bool:
        """Whether it names a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str, file: str | None = None) -> Self:
        return dataclasses.replace(self, revision=commit, file=file or self.file)

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{PREFIX}{self.repo}{revision}" + ("" if self.file is None else f"/{self.file}")
