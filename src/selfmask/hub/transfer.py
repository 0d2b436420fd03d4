"""To the hub and back: files of one commit, whole or not at all, at a revision that is pinned once it is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub import errors as theirs

from ..errors import (
    CardError,
    HubAccessError,
    HubError,
    HubFileError,
    HubNotFoundError,
    HubUnreachableError,
    SelfmaskError,
)
from ..files import RunFile, write_atomically
from .address import HubAddress

MOST_BYTES = 1 << 30
"""Of a file that is downloaded without a base, by which its size could be judged."""
_LOG_IN = "log in with a token that may write: `hf auth login`, or set HF_TOKEN"


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A file of the hub on this machine, and its address with the commit that it is of."""

    path: Path
    address: HubAddress


def fetch(text: str, *, file: str = RunFile.MASK, most: int = MOST_BYTES) -> Fetched:
    """The file that an address names, by default the mask, from the cache if that has the commit.

    Its size is asked before anything is downloaded. The file is one of a stranger: its reader checks it as any other.
    """
    address = HubAddress.parse(text)
    wanted = dataclasses.replace(address, file=address.file or file)
    if (wanted.pinned or constants.HF_HUB_OFFLINE) and (cached := _cached(wanted)) is not None:
        return cached
    with _told(wanted, "downloaded"):
        if constants.HF_HUB_OFFLINE:
            raise theirs.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        assert wanted.file is not None
        url = hf_hub_url(wanted.repo, wanted.file, revision=wanted.revision, endpoint=constants.ENDPOINT)
        about = get_hf_file_metadata(url, token=None)
        if about.commit_hash is None or about.size is None:
            raise HubFileError(f"{wanted} cannot be downloaded", found="the hub does not tell its commit and size")
        if about.size > most:
            raise HubFileError(
                f"{wanted} is too large to be what it should be",
                expected=f"at most {most:,} bytes",
                found=f"{about.size:,}",
                todo="check the address; if you trust it, download it with `hf download` and give the file",
            )
        at = wanted.at(about.commit_hash)
        path = hf_hub_download(at.repo, wanted.file, revision=at.revision, endpoint=constants.ENDPOINT)
    found = Fetched(Path(path), at)
    if not wanted.pinned:
        remember(wanted.revision, found)
    return found


def remember(revision: str | None, found: Fetched) -> None:
    """Keep in the cache, where its library looks for it, which commit a branch was: for offline mode.

    The library itself does so only for what it downloads by the name of the branch, and that may change meanwhile.
    """
    assert found.address.file is not None
    refs = found.path.parents[found.address.file.count("/") + 2] / "refs"
    with suppress(OSError, SelfmaskError):
        write_atomically(refs / (revision or constants.DEFAULT_REVISION), str(found.address.revision).encode())


def names_of(text: str) -> tuple[HubAddress, dict[str, int | None]]:
    """The files of a repository and their sizes, and its address with the commit that has them."""
    address = HubAddress.parse(text)
    with _told(address, "read"):
        about = _api().model_info(address.repo, revision=address.revision, files_metadata=True)
        if about.sha is None:
            raise HubFileError(f"{address} cannot be read", found="the hub does not tell its commit")
        return address.at(about.sha), {each.rfilename: each.size for each in about.siblings or ()}


def check_access(repo: str) -> None:
    """Refuse, before any work, a repository that could not be written to as far as the hub tells who we are."""
    address = HubAddress.parse(repo)
    with _told(address, "pushed to"):
        who = _api().whoami()
    mine = [str(who.get("name")), *(str(each.get("name")) for each in who.get("orgs") or ())]
    owner = address.repo.partition("/")[0]
    if owner not in mine:
        raise HubAccessError(
            f"{address.repo} cannot be pushed to",
            expected=f"a repository of {' or '.join(mine)}",
            found=f"one of {owner}",
            todo=f"push to {mine[0]}/{address.repo.partition('/')[2]}, or log in as {owner}: `hf auth login`",
        )
    token = (who.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise HubAccessError(
            f"{address.repo} cannot be pushed to", expected="a token that may write", found="a read token", todo=_LOG_IN
        )


def push(
    repo: str, files: Mapping[str, bytes | Path], *, private: bool = True, message: str, revision: str | None = None
) -> HubAddress:
    """Put files into a repository in one commit; return its address with that commit.

    The repository is made if there is none; `private` decides only then. The hub checks the card (README.md) first.
    """
    check_access(repo)
    address = HubAddress.parse(repo)
    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    with _told(address, "pushed to"):
        api = _api()
        api.create_repo(address.repo, private=private, exist_ok=True)
        try:
            made = api.create_commit(address.repo, added, commit_message=message, revision=revision)
        except ValueError as error:  # of the card; the kinds below are ours to tell apart
            if isinstance(error, theirs.HfHubHTTPError):
                raise
            raise CardError(
                f"the hub refuses the card of {address.repo}, and nothing was pushed",
                found=str(error).strip()[:500],
                todo="check the licence: an identifier such as cc-by-4.0, or other",
            ) from error
    return address.at(made.oid)


def _api() -> HfApi:
    return HfApi(endpoint=constants.ENDPOINT, library_name="selfmask")


def _cached(address: HubAddress) -> Fetched | None:
    """A file that was downloaded before; of a branch, as it was then."""
    assert address.file is not None
    path = try_to_load_from_cache(address.repo, address.file, revision=address.revision)
    # In the cache, the folder of a file is named after its commit.
    return Fetched(Path(path), address.at(_commit_of(Path(path), address.file))) if isinstance(path, str) else None


def _commit_of(path: Path, file: str) -> str:
    return path.parents[file.count("/")].name


@contextmanager
def _told(address: HubAddress, done: str) -> Iterator[None]:
    """What the hub and its library have to say, as an error of ours. They have many kinds, and change them."""
    what = f"{address} cannot be {done}"
    try:
        yield
    except SelfmaskError:
        raise
    except (theirs.LocalTokenNotFoundError, theirs.GatedRepoError) as error:
        gated = isinstance(error, theirs.GatedRepoError)
        found = "its owner asks who wants to have it" if gated else "you are not logged in"
        todo = f"ask for access at {constants.ENDPOINT}/{address.repo}" if gated else _LOG_IN
        raise HubAccessError(what, expected="credentials of the hub", found=found, todo=todo) from error
    except theirs.OfflineModeIsEnabled as error:
        raise HubUnreachableError(
            what,
            expected="a file in the cache of the hub, or a connection",
            found="offline mode (HF_HUB_OFFLINE), and not in the cache",
            todo="unset HF_HUB_OFFLINE, or bring a cache with it here and set HF_HOME to it",
        ) from error
    except theirs.RevisionNotFoundError as error:
        raise HubNotFoundError(
            what,
            found=f"no revision {address.revision}",
            todo=f"see {constants.ENDPOINT}/{address.repo}/commits/main, or leave the revision out",
        ) from error
    except theirs.LocalEntryNotFoundError as error:
        raise _unreachable(what, address, error) from error
    except theirs.EntryNotFoundError as error:
        raise HubNotFoundError(
            what,
            found=f"no file {address.file}",
            todo=f"see {constants.ENDPOINT}/{address.repo}/tree/{address.revision or 'main'}, and name the file: "
            f"hf://{address.repo}/FILE",
        ) from error
    except theirs.RepositoryNotFoundError as error:
        raise HubNotFoundError(
            what,
            found="no such repository, or a private one that you may not see",
            todo="check its name; if it is private, log in: `hf auth login`, or set HF_TOKEN",
        ) from error
    except theirs.HfHubHTTPError as error:
        raise _refused(what, address, error) from error
    except Exception as error:  # of httpx or requests, by release; a connection, or a disk
        raise _unreachable(what, address, error) from error


def _refused(what: str, address: HubAddress, error: Any) -> HubError:
    """By the status that the hub answered with."""
    status = error.response.status_code
    found = f"{status}: {str(error.server_message or error).strip().splitlines()[0][:300]}"
    if status in (401, 403):
        return HubAccessError(what, expected="credentials that allow it", found=found, todo=_LOG_IN)
    if status in (408, 429) or status >= 500:
        return _unreachable(what, address, found)
    return HubError(what, found=found, todo="see what the hub says, change it, and try again")


def _unreachable(what: str, address: HubAddress, found: object) -> HubUnreachableError:
    name = f"{type(found).__name__}: " if isinstance(found, Exception) else ""
    todo = f"check the connection to {constants.ENDPOINT}, and try again: nothing is left half-written"
    kept = None if address.file is None else _cached(address)
    if kept is not None:
        todo += f"; or use what was downloaded before: {kept.address}"
    return HubUnreachableError(what, found=f"{name}{str(found).strip().splitlines()[0][:300]}", todo=todo)
