"""One thread per test process: with two workers on two cores, threads that wait for each other cost tenfold."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
