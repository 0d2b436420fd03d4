"""How good features are: k-NN and linear probes."""

from .knn import knn_accuracy, knn_predict, nearest
from .probe import few_label_probe, linear_probe

__all__ = ["few_label_probe", "knn_accuracy", "knn_predict", "linear_probe", "nearest"]
