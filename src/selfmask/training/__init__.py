"""Training: one loop for every objective, and the folder that holds all of a run."""

from .batches import Steps
from .config import LoopConfig, RunConfig
from .folder import RunFolder, open_folder
from .guard import Guard
from .loop import ParameterGroup, train
from .processes import Processes

__all__ = [
    "Guard",
    "LoopConfig",
    "ParameterGroup",
    "Processes",
    "RunConfig",
    "RunFolder",
    "Steps",
    "open_folder",
    "train",
]
