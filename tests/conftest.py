"""Settings for all tests."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; threads that wait for each other would make every test several times slower.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
