"""Vectors on a plane, neighbours near each other, to be looked at."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits
from torch import Tensor

LEAST = 4
"""Fewer points have no neighbours to speak of."""


def plane_of(vectors: Tensor, seed: int) -> NDArray[np.float32]:
    """t-SNE: a point [n, 2] for each of the vectors [n, d]."""
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed % 2**32)
    # As many threads as torch has: left to itself it takes all cores, and waits for those that are busy.
    with threadpool_limits(torch.get_num_threads()):
        points: NDArray[np.float32] = tsne.fit_transform(vectors.cpu().numpy())
    return points
