"""Training: one loop for every objective, and the folder that holds all of a run."""

from .batches import Steps
from .folder import RunFolder, open_folder
from .loop import LoopConfig, ParameterGroup, train
from .processes import Processes

__all__ = ["LoopConfig", "ParameterGroup", "Processes", "RunFolder", "Steps", "open_folder", "train"]
