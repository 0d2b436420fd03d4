"""Write lightly_swav.npz: inputs, and what lightly 1.6.0 (MIT licence) makes of them.

lightly is no dependency. To run this again, install it without its own dependencies and name the place:

    pip install --no-deps --target LIGHTLY lightly==1.6.0
    python tests/objectives/make_lightly_golden.py LIGHTLY

The one file that is needed, lightly/loss/swav_loss.py, imports nothing but torch, so it is loaded alone.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

IMAGES, PROTOTYPES, DIMENSIONS, LARGE, SMALL, QUEUE = 8, 12, 6, 2, 2, 24


def load(folder: Path) -> Any:
    assert (folder / "lightly-1.6.0.dist-info").exists(), "lightly 1.6.0 is expected"
    spec = importlib.util.spec_from_file_location("swav_loss", folder / "lightly/loss/swav_loss.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder: Path) -> None:
    lightly = load(folder)
    torch.manual_seed(0)
    projections = F.normalize(torch.randn(LARGE + SMALL, IMAGES, DIMENSIONS), dim=2)
    prototypes = F.normalize(torch.randn(PROTOTYPES, DIMENSIONS), dim=1)
    queue = F.normalize(torch.randn(LARGE, QUEUE, DIMENSIONS), dim=2)
    weight = prototypes.clone().requires_grad_()
    scores, past = projections @ weight.T, queue @ prototypes.T
    loss = lightly.SwaVLoss()
    plain = loss(list(scores[:LARGE]), list(scores[LARGE:]))
    queued = loss(list(scores[:LARGE]), list(scores[LARGE:]), list(past))
    plain_gradient, queued_gradient = (
        torch.autograd.grad(value.sum(), weight, retain_graph=True)[0] for value in (plain, queued)
    )
    arrays = {
        "projections": projections,
        "prototypes": prototypes,
        "queue": queue,
        "loss": plain,
        "loss_with_queue": queued,
        "gradient": plain_gradient,
        "gradient_with_queue": queued_gradient,
        "assignments": torch.stack([lightly.sinkhorn(s) for s in scores.detach()[:LARGE]]),
        "assignments_sharp": torch.stack(
            [lightly.sinkhorn(s, iterations=5, epsilon=0.03) for s in scores.detach()[:LARGE]]
        ),
    }
    np.savez_compressed(
        Path(__file__).with_name("lightly_swav.npz"), **{k: v.detach().numpy() for k, v in arrays.items()}
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
