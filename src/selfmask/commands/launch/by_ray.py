"""Jobs as tasks of a Ray cluster.

Shards are tasks, too, and not a pipeline of `ray.data`: that would choose batches and files by itself, so vectors would
not be those of one process to the bit, and what was cut short could not be continued.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError, MissingExtraError
from .job import End, Job, last_error

# Ray allows a thread for each core that a task asks for; what this process was told goes first: rounding depends on it.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class ByRay:
    """options: as Ray names those of tasks: num_cpus, num_gpus, memory, max_retries, ...; and the cluster's address.

    Without an address: RAY_ADDRESS, or the cluster that this machine is part of, or one that ends with the jobs.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self.folder, self.options = folder.absolute(), {"num_cpus": 1, **options}
        self.address = self.options.pop("address", None)

    def run(self, jobs: Sequence[Job]) -> Iterator[End]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Of a cluster for these jobs alone: workers with the lowest priority embedded 7 % fewer images a second.
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            import ray
        except ImportError:
            raise MissingExtraError(
                "cannot launch jobs: ray is not installed", todo="pip install 'selfmask[ray]'"
            ) from None
        try:
            task = ray.remote(_run).options(**self.options)
            ray.init(address=self.address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                "cannot launch jobs with ray", found=error, todo="check the cluster and --job-option"
            ) from error
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            own = {key: value for key, value in os.environ.items() if key.startswith("SELFMASK_") or key in _THREADS}
            logs = [self.folder / f"{time.time_ns()}_{number}_log.out" for number in range(len(jobs))]
            given = {task.remote(job, str(log), own): (job, log) for job, log in zip(jobs, logs, strict=True)}
            left = list(given)
            while left:
                done, left = ray.wait(left)
                for each in done:
                    job, log = given[each]
                    yield End(job, log, _trouble(each, log))
        finally:
            ray.shutdown()  # cancels what is left


def _run(job: Job, log: str, environment: Mapping[str, str]) -> None:
    """On a node of the cluster."""
    with Path(log).open("ab") as output:
        output.write(f"{socket.gethostname()}, process {os.getpid()}: {job}\n".encode())
        output.flush()
        job(output, environment)


def _trouble(done: Any, log: Path) -> str | None:
    """Nodes and workers that were lost are nothing to tell: Ray has run their jobs again, unless that happens often."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        ray.get(done)
    except RayTaskError as error:  # raised by the job
        return last_error(log, str(error.cause))
    except RayError as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None
