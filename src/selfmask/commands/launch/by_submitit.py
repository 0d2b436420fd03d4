"""Jobs as processes of this machine, or of Slurm, through submitit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError, MissingExtraError
from .job import End, Job, last_error

_MINUTES = 24 * 60
_RESTARTS = 20  # of a job whose time is over
_ARRAY = 1000  # jobs that are submitted at once; what Slurm allows unless it was told otherwise


class BySubmitit:
    """options: as submitit names them: timeout_min, slurm_partition, gpus_per_node, ..."""

    def __init__(self, cluster: Literal["local", "slurm"], folder: Path, options: Mapping[str, Any]) -> None:
        self.cluster, self.folder, self.options = cluster, folder, options

    def run(self, jobs: Sequence[Job]) -> Iterator[End]:
        given = self._submitted(jobs)
        try:
            for job, each in zip(jobs, given, strict=True):
                error = each.exception()
                log = Path(each.paths.stdout)
                yield End(job, log, None if error is None else last_error(log, _last_line(error)))
        except BaseException:
            for each in given:
                if not each.done():
                    each.cancel(check=False)
            raise

    def _submitted(self, jobs: Sequence[Job]) -> list[Any]:
        try:
            import submitit
        except ImportError:
            raise MissingExtraError(
                "cannot launch jobs: submitit is not installed", todo="pip install 'selfmask[launch]'"
            ) from None
        given = []
        try:
            executor = submitit.AutoExecutor(self.folder, self.cluster, slurm_max_num_timeout=_RESTARTS)
            executor.update_parameters(**{"timeout_min": _MINUTES, "stderr_to_stdout": True, **self.options})
            for first in range(0, len(jobs), _ARRAY):
                with executor.batch():
                    given += [executor.submit(job) for job in jobs[first : first + _ARRAY]]
        except (
            RuntimeError,
            NameError,
            ValueError,
            AssertionError,  # of a wrong type
            submitit.core.utils.FailedSubmissionError,
        ) as error:
            raise ConfigError(
                f"cannot launch jobs with {self.cluster}", found=error, todo="check the engine and --job-option"
            ) from error
        return given


def _last_line(error: BaseException) -> str:
    """Without the rule below what submitit quotes."""
    lines = (line.strip() for line in reversed(str(error).splitlines()))
    return next((line for line in lines if line.strip("-")), type(error).__name__)
