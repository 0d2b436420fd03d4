"""Where published weights lie: on this machine if they are, else on the network, asked with little patience."""

from __future__ import annotations

import dataclasses
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Protocol
from urllib.parse import urlparse

import torch
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from ..errors import WeightsUnavailableError

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

    @property
    def where(self) -> str:
        return f"{constants.ENDPOINT}/{self.repo}/resolve/main/{self.names[0]}"

    @property
    def todo(self) -> str:
        return (
            f"on a machine with internet access, download {self.where} and pass it as --weights (in Python: weights=); "
            f"or copy a Hugging Face cache that contains {self.repo} to this machine and set HF_HOME to it"
        )

    def local(self) -> Path | None:
        found = (try_to_load_from_cache(self.repo, name) for name in self.names)
        return next((Path(path) for path in found if isinstance(path, str)), None)

    def download(self) -> Path:
        for name in self.names[:-1]:
            try:
                return Path(hf_hub_download(self.repo, name))
            except LocalEntryNotFoundError:  # the network broke down, it says nothing about the repository
                raise
            except EntryNotFoundError:
                continue
        return Path(hf_hub_download(self.repo, self.names[-1]))


@dataclasses.dataclass(frozen=True)
class WebFile:
    """A file at an address, kept in the cache of torch.hub."""

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
        torch.hub.download_url_to_file(self.where, str(self._cached))
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
    raise WeightsUnavailableError(
        f"the weights of {name} are not on this machine and could not be downloaded",
        expected=source.where,
        found=why.splitlines()[0],
        todo=source.todo,
    ) from cause


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
