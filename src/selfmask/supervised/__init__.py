"""Learning from labels: masks, and the methods they are compared with."""

from .config import TrainConfig
from .data import open_labelled
from .run import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "open_labelled", "train"]
