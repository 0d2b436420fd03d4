"""What every stage of a cascade needs to know, and what is checked before the work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from ...cascade.clusters import Clusters
from ...data import Images
from ...data.identity import identity
from ...errors import ClusterError, ConfigError, ExpertError, RunMismatchError, TooManyBadImagesError
from ...files import RunFile
from ...maskfile import Fingerprints
from ...memory import memory_left
from ...preprocessing import Preprocessing
from ...training import Processes, RunFolder, open_folder
from ...training.start import Start
from ..adapt import held_count
from .config import CascadeConfig

ROUTER = RunFile.ROUTER
_COVARIANCES = 6  # as large as the sums of both combinations, and what finding their components takes


@dataclasses.dataclass(frozen=True)
class Job:
    """What any stage needs to know; it can be sent to another process."""

    model: nn.Module
    images: Images
    config: CascadeConfig
    folder: Path
    preprocessing: Preprocessing | None
    about: Mapping[str, Any]
    max_bad: float

    @property
    def dispatcher(self) -> Path:
        return self.folder / "dispatcher"

    def expert(self, index: int) -> Path:
        return self.folder / "experts" / str(index)

    def has_expert(self, index: int) -> bool:
        return all((self.expert(index) / name).exists() for name in (RunFile.MASK, RunFile.RESULT))

    def clusters(self) -> Clusters:
        return Clusters.load(self.folder / ROUTER, self.config)

    @property
    def has_mask(self) -> bool:
        """Whether there is a dispatcher."""
        return (self.dispatcher / RunFile.MASK).exists()

    @property
    def missing(self) -> list[int]:
        """The experts that are still to be trained."""
        return [k for k in range(self.config.experts) if not self.has_expert(k)]


@contextmanager
def opened(job: Job, given: str | Path | None) -> Iterator[RunFolder]:
    """The folder of the cascade, which nobody else may write to; settings that decide the result must be as before."""
    if Processes().count > 1:
        raise ConfigError(
            "a cascade runs in one process",
            todo="start it without torchrun; a dispatcher adapted on several GPUs can be passed with --dispatcher",
        )
    with open_folder(job.folder, True, Processes()) as folder:
        assert folder is not None
        dispatcher = None if given is None else identity_of(job, Start.of(given))
        what = {"base": Fingerprints().of(job.model.state_dict())[:16], "content": identity(job.images)[:16]}
        folder.begin({"verb": "cascade", **job.about}, job.config.to_dict(), {**what, "dispatcher": dispatcher})
        yield folder


def check_begun(job: Job) -> None:
    """Whether experts can be trained here, or collected: there is a router, and images are those it was made for."""
    if not (job.folder / ROUTER).exists():
        raise ExpertError(
            f"the cascade in {job.folder} has no router yet",
            todo="run the command that started it again (with --prepare, it stops before the experts)",
        )
    check_images(job)


def check_images(job: Job) -> None:
    """Whether images are those that the cascade was begun with: stages read them again, hours later at times."""
    began = RunFolder.read_json(job.folder / RunFile.CONFIG)
    if began.get("facts", {}).get("content") != (content := identity(job.images)[:16]):
        raise RunMismatchError(
            f"these are not the images that the cascade in {job.folder} was started with",
            expected=began.get("facts", {}).get("content"),
            found=f"{content}, {len(job.images):,} images",
            todo="give the same images under the same names: --data",
        )


def identity_of(job: Job, given: Start) -> str:
    """Of a dispatcher that was given; one that cannot be used is refused."""
    size, preprocessing = job.config.adapt.size, given.preprocessing
    if size is not None and preprocessing is not None and preprocessing.size != (size, size):
        raise ConfigError(
            f"{given.mask} was learned on images of another size",
            expected=preprocessing.size,
            found=size,
            todo="omit --size",
        )
    return given.identity(job.model, size)


def check_readable(job: Job, readable: int) -> None:
    bad = len(job.images) - readable
    if bad > job.max_bad * len(job.images):
        raise TooManyBadImagesError(
            f"{bad:,} of {len(job.images):,} images cannot be read",
            expected=f"at most {job.max_bad:.0%}",
            found=f"{bad / len(job.images):.0%}",
            todo="check the images, or allow more unreadable ones: --max-bad",
        )


def check_memory(experts: int, width: int) -> None:
    """Before experts are trained in vain: the covariance of all features is the largest thing a cascade needs."""
    needed = _COVARIANCES * 8 * ((experts + 1) * width) ** 2
    there = memory_left(psutil.virtual_memory().available)
    if needed > there:
        raise ConfigError(
            f"combining {experts} experts with {width:,} features needs more memory than is available",
            expected=f"about {needed / 2**30:.0f} GB",
            found=f"{there / 2**30:.0f} GB",
            todo="use fewer experts: --experts; or free memory, or raise the limit of this container or job",
        )


def least_images(config: CascadeConfig) -> int:
    """The fewest images that an expert can be trained on: a batch, besides those that are held out."""
    count = config.adapt.batch_size
    while count - held_count(count, config.adapt) < config.adapt.batch_size:
        count += 1
    return count


def check_enough(job: Job) -> None:
    """Before the dispatcher is trained in vain: however images are clustered, there must be enough for all experts."""
    least, experts = least_images(job.config), job.config.experts
    if len(job.images) < least * experts:
        raise ClusterError(
            "there are fewer images than the experts need",
            expected=f"at least {least:,} for each of {experts} experts, {least * experts:,} in all",
            found=f"{len(job.images):,} images",
            todo=f"use fewer experts (--experts {max(1, len(job.images) // least)}) or a smaller batch (--batch-size), "
            "or learn one mask: selfmask adapt",
        )
