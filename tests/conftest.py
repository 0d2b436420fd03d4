"""Settings for all tests."""

import os
import random

import numpy as np
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; threads that wait for each other would make every test several times slower.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws at random is the same every time, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Features that tests keep are none of the user's; also in the processes they start."""
    os.environ["SELFMASK_CACHE"] = str(tmp_path_factory.mktemp("features"))
