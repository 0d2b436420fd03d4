"""Where published weights lie: on this machine if they are, else on the network, asked with little patience.

What is downloaded can be pinned: a file of the hub to a commit of its repository, any file to its SHA-256. Where none
is known, a mask still knows the right weights: by the fingerprint of its base.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Protocol
from urllib.parse import urlparse

import torch
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from ..errors import BadWeightsError, WeightsUnavailableError

_PATIENCE = 5.0  # seconds; the libraries would try again for most of a minute


class Source(Protocol):
    """A place that weights come from."""

    @property
    def where(self) -> str: ...

    @property
    def todo(self) -> str: ...

    def local(self) -> Path | None:
        """The file, if it is on this machine already; asks no network."""

    def download(self) -> Path: ...


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file in a repository of the Hugging Face hub, under the first of these names that is there."""

    repo: str
    names: tuple[str, ...]
    revision: str | None = None
    """The commit to download; None for whatever the repository holds by then."""

    @property
    def where(self) -> str:
        return f"{constants.ENDPOINT}/{self.repo}/resolve/{self.revision or 'main'}/{self.names[0]}"

    @property
    def todo(self) -> str:
        return (
            f"on a machine with internet access, download {self.where} and pass it as --weights (in Python: weights=); "
            f"or copy a Hugging Face cache that contains {self.repo} to this machine and set HF_HOME to it"
        )

    def local(self) -> Path | None:
        # What the user brought here under another commit serves too: only downloads are pinned.
        places = [(name, revision) for revision in dict.fromkeys((self.revision, None)) for name in self.names]
        found = (try_to_load_from_cache(self.repo, name, revision=revision) for name, revision in places)
        return next((Path(path) for path in found if isinstance(path, str)), None)

    def download(self) -> Path:
        for name in self.names[:-1]:
            try:
                return Path(hf_hub_download(self.repo, name, revision=self.revision))
            except LocalEntryNotFoundError:  # the network broke down, it says nothing about the repository
                raise
            except EntryNotFoundError:
                continue
        return Path(hf_hub_download(self.repo, self.names[-1], revision=self.revision))


@dataclasses.dataclass(frozen=True)
class WebFile:
    """A file at an address, kept in the cache of torch.hub; one with the start of its hash in its name is checked."""

    where: str

    @property
    def todo(self) -> str:
        return (
            f"on a machine with internet access, download {self.where} and pass it as --weights (in Python: weights=); "
            f"or save it here as {self._cached} (set TORCH_HOME to move that folder)"
        )

    @property
    def _cached(self) -> Path:
        return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(self.where).path).name

    def local(self) -> Path | None:
        return self._cached if self._cached.is_file() else None

    def download(self) -> Path:
        self._cached.parent.mkdir(parents=True, exist_ok=True)
        known = re.search(r"-([0-9a-f]{8,64})\.", self._cached.name)  # the custom of torch.hub
        torch.hub.download_url_to_file(self.where, str(self._cached), hash_prefix=known[1] if known else None)
        return self._cached


@dataclasses.dataclass(frozen=True)
class InstalledFile:
    """A file that an installed package brings."""

    path: Path
    todo: str

    @property
    def where(self) -> str:
        return str(self.path)

    def local(self) -> Path | None:
        return self.path if self.path.is_file() else None

    def download(self) -> Path:
        raise FileNotFoundError(f"there is no file {self.path}")


def fetch(source: Source, name: str) -> Path:
    """The weights of the backbone `name` as a file on this machine, downloaded if need be."""
    if (path := source.local()) is not None:
        return path
    why = _why_unreachable(source.where) if source.where.startswith("http") else None
    if why is None:
        try:
            return source.download()
        except Exception as error:  # every library below has its own kinds, and they change between releases
            why, cause = f"{type(error).__name__}: {error}", error
    else:
        cause = None
    other = "; to try selfmask without a download, use the backbone selfmask/tiny"
    raise WeightsUnavailableError(
        f"the weights of {name} are not on this machine and could not be downloaded",
        expected=source.where,
        found=why.splitlines()[0],
        todo=source.todo + (other if source.where.startswith("http") else ""),
    ) from cause


def check_sha256(path: Path, expected: str, name: str) -> None:
    """Refuse a file of weights that is not the one that was meant."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise BadWeightsError(
            f"the weights of {name} are not those that were asked for",
            expected=f"SHA-256 {expected}",
            found=found,
            todo=f"remove {path} and download it again, or give its true hash",
        )


def _why_unreachable(address: str) -> str | None:
    """None if the host of this address answers soon, whatever it says; else the reason."""
    verdict: list[str | None] = [f"no answer within {_PATIENCE:.0f} s"]

    def ask() -> None:
        host = urlparse(address)
        request = urllib.request.Request(f"{host.scheme}://{host.netloc}", method="HEAD")  # noqa: S310  always http(s)
        try:
            with urllib.request.build_opener().open(request, timeout=_PATIENCE):
                verdict[0] = None
        except urllib.error.HTTPError:
            verdict[0] = None
        except Exception as error:
            reason = getattr(error, "reason", error)
            # Certificates are for the downloading library to judge: it may know others than we do here.
            verdict[0] = None if "CERTIFICATE" in str(reason) else f"no connection to {host.netloc}: {reason}"

    # In a thread, because looking up a host name knows no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return verdict[0]
