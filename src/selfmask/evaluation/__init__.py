"""How good features are: k-NN and linear probes."""

from .knn import knn_accuracy, knn_predict, nearest
from .probe import LinearProbe, few_label_probe, linear_probe, linear_probe_fit

__all__ = [
    "LinearProbe",
    "few_label_probe",
    "knn_accuracy",
    "knn_predict",
    "linear_probe",
    "linear_probe_fit",
    "nearest",
]
