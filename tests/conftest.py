"""Settings for all tests: what they draw is fixed, their order is shuffled, and Ctrl-C is heard."""

import gc
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from selfmask.commands.cascade import outcome

# Another one shows whether a test holds by luck.
SEED = int(os.environ.get("SELFMASK_TEST_SEED", "0"))
ROOT = Path(__file__).parents[1]

# Workers share the cores; threads that wait for each other would make every test several times slower. And sums
# over threads are rounded otherwise than those of one.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# What `--precision auto` means depends on the CPU; without its instructions for bfloat16, it is float32 everywhere.
# This is oneDNN's own setting, which it reads when it first computes.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"

# Processes that tests start see what this one sees: the sources that are tested, and the tests.
_PATHS = [os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")


def seed_everything() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def pytest_configure(config: pytest.Config) -> None:
    # pytest-randomly shuffles; were it to seed as well, every run would draw other numbers.
    config.option.randomly_reset_seed = False


def pytest_collection_finish() -> None:
    # Millions of objects that imports made live as long as the process: no collection needs to look at them again.
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.write_line(f"order of tests: --randomly-seed={config.getoption('randomly_seed', None)}")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """What fixtures of a module draw is the same, whichever test is the first to need them."""
    if fixturedef.scope != "function":
        seed_everything()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws at random is the same every time, whatever ran before it."""
    seed_everything()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Features that tests keep are none of the user's; also in the processes they start."""
    os.environ["SELFMASK_CACHE"] = str(tmp_path_factory.mktemp("features"))


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard() -> Iterator[None]:
    """`nohup make test &` ignores SIGINT, and so would every process that a test starts and interrupts."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def _small_maps() -> Iterator[None]:
    """Few points on the maps of reports: they would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcome, "_POINTS", 40)
        yield
