"""SwAV against a naive oracle in plain loops, against lightly, and against itself in two processes."""

from __future__ import annotations

import copy
import io
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from selfmask.errors import ConfigError
from selfmask.objectives import Objective
from selfmask.objectives.swav import SwAV, SwAVConfig, run_by_size, sinkhorn

from ..processes import PROCESSES
from . import small

torch.set_num_threads(1)
GOLDEN = Path(__file__).with_name("lightly_swav.npz")
SIZES = (8, 8, 4, 4)
IMAGES = 4
TINY = {"projection": 6, "prototypes": 5, "queue_length": 8, "queue_start": 0.25, "freeze_prototypes": 0.5}
FEATURES = 7
Array = Any
backbone = partial(small.backbone, FEATURES)


def objective(seed: int = 0, **settings: Any) -> SwAV:
    return SwAV(FEATURES, SwAVConfig(**{**TINY, **settings}), seed=seed)


def batches(count: int, images: int = IMAGES) -> list[list[Tensor]]:
    torch.manual_seed(2)
    return [[torch.randn(images, 3, size, size) for size in SIZES] for _ in range(count)]


# ---- the oracle: float64, one number at a time ---------------------------------------------------------------


def naive_sinkhorn(scores: Array, epsilon: float, iterations: int) -> Array:
    q = np.exp(scores.astype(np.float64) / epsilon).T
    q /= q.sum()
    k, b = q.shape
    for _ in range(iterations):
        for row in range(k):
            q[row] /= q[row].sum() * k
        for column in range(b):
            q[:, column] /= q[:, column].sum() * b
    return (q * b).T


class Naive:
    """The same objective, in loops over images and prototypes."""

    def __init__(self, config: SwAVConfig, like: SwAV) -> None:
        self.config = config
        self.weight, self.bias = (p.detach().double().numpy() for p in like.projector.parameters())
        self.prototypes = like.prototypes.weight.detach().double().numpy()
        self.queues: list[list[Array]] = [[], []]

    def loss(self, features: Array, progress: float) -> tuple[float, Array]:
        """The loss for features [views, images, dimensions]; the assignments of the two large views."""
        z = features @ self.weight.T + self.bias
        z /= np.sqrt((z**2).sum(-1, keepdims=True))
        assignments = []
        for view in range(2):
            rows = list(z[view])
            if len(self.queues[view]) == self.config.queue_length:
                rows += self.queues[view]
            q = naive_sinkhorn(np.stack(rows) @ self.prototypes.T, self.config.epsilon, self.config.iterations)
            assignments.append(q[: z.shape[1]])
        pairs = []
        for s in range(2):
            for t in range(len(z)):
                if t == s:
                    continue
                total = 0.0
                for image in range(z.shape[1]):
                    logits = [float(z[t, image] @ c) / self.config.temperature for c in self.prototypes]
                    log_sum = math.log(sum(math.exp(logit) for logit in logits))
                    total -= sum(assignments[s][image][k] * (logits[k] - log_sum) for k in range(len(logits)))
                pairs.append(total / z.shape[1])
        if progress >= self.config.queue_start:
            for view in range(2):
                self.queues[view] = (list(z[view]) + self.queues[view])[: self.config.queue_length]
        return sum(pairs) / len(pairs), np.stack(assignments)


def features_of(model: nn.Module, views: list[Tensor]) -> Array:
    with torch.no_grad():
        return torch.stack([model(view) for view in views]).double().numpy()


def test_loss_and_queue_equal_the_oracle_through_a_run() -> None:
    swav, model = objective(), backbone()
    naive = Naive(swav.config, swav)
    used = []
    for step, views in enumerate(batches(8)):
        expected, assignments = naive.loss(features_of(model, views), step / 8)
        loss, health = swav.loss(model, views, step / 8)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        assert health.guess == pytest.approx(math.log(5))
        entropy = -(assignments * np.log(assignments)).sum(-1).mean()
        assert float(health.more["assignment_entropy"]) == pytest.approx(entropy, rel=1e-4)
        chosen = set(assignments.argmax(-1).ravel().tolist())
        assert float(health.more["prototypes_used"]) == pytest.approx(len(chosen) / 5)
        used.append(health.more["queue_used"])
        for view in range(2):
            held = swav.queue[view].numpy()
            np.testing.assert_allclose(
                held[: len(naive.queues[view])], np.array(naive.queues[view] or held[:0]), atol=1e-6
            )
    # It starts at a quarter of 8 steps; two batches of 4 fill its 8 places; it is used from then on.
    assert used == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("full", [False, True])
def test_gradients_equal_finite_differences_of_the_oracle(full: bool) -> None:
    """Of the heads and of the features, with the assignments held fixed: no gradient flows through them."""
    swav = objective()
    torch.manual_seed(4)
    views = torch.randn(4, IMAGES, FEATURES, requires_grad=True)
    if full:
        swav.queue.copy_(nn.functional.normalize(torch.randn(2, 8, 6), dim=2))
        swav.queue_filled.fill_(8)
    naive = Naive(swav.config, swav)
    if full:
        naive.queues = [list(swav.queue[view].double().numpy()) for view in range(2)]
    _, fixed = naive.loss(views.detach().double().numpy(), 0.0)

    def value(features: Array, weight: Array, bias: Array, prototypes: Array) -> float:
        z = features @ weight.T + bias
        z = z / np.linalg.norm(z, axis=-1, keepdims=True)
        logits = z @ prototypes.T / 0.1
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float(np.mean([-(fixed[s] * log_p[t]).sum(-1).mean() for s in range(2) for t in range(4) if s != t]))

    swav.loss(nn.Identity(), list(views), 0.0)[0].backward()
    tensors = [views, *swav.projector.parameters(), swav.prototypes.weight]
    arrays = [tensor.detach().double().numpy() for tensor in tensors]
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.grad is not None
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + 1e-5
            above = value(*arrays)
            array[index] = kept - 1e-5
            below = value(*arrays)
            array[index] = kept
            assert float(tensor.grad[index]) == pytest.approx((above - below) / 2e-5, rel=1e-3, abs=1e-5)


# ---- lightly -------------------------------------------------------------------------------------------------


def golden() -> dict[str, Tensor]:
    with np.load(GOLDEN) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def test_assignments_equal_lightlys() -> None:
    known = golden()
    scores = known["projections"][:2] @ known["prototypes"].T
    for own, expected, sharp in zip(scores, known["assignments"], known["assignments_sharp"], strict=True):
        torch.testing.assert_close(sinkhorn(own, 0.05, 3), expected)
        torch.testing.assert_close(sinkhorn(own, 0.03, 5), sharp)


@pytest.mark.parametrize("queue", ["", "_with_queue"])
def test_loss_equals_lightlys(queue: str) -> None:
    """lightly takes scores; an identity as backbone and projector makes ours take projections."""
    known = golden()
    length = known["queue"].shape[1] if queue else 0
    config = SwAVConfig(projection=6, prototypes=12, queue_length=length)
    swav = SwAV(6, config)
    with torch.no_grad():
        swav.projector.weight.copy_(torch.eye(6))
        swav.projector.bias.zero_()
        swav.prototypes.weight.copy_(known["prototypes"])
        if queue:
            swav.queue.copy_(known["queue"])
            swav.queue_filled.fill_(length)
    loss, _ = swav.loss(nn.Identity(), list(known["projections"]), 0.0)
    loss.backward()
    torch.testing.assert_close(loss, known[f"loss{queue}"].squeeze())
    torch.testing.assert_close(swav.prototypes.weight.grad, known[f"gradient{queue}"])


# ---- Sinkhorn ------------------------------------------------------------------------------------------------


def test_sinkhorn_shares_out_evenly() -> None:
    torch.manual_seed(0)
    scores = torch.randn(60, 10).clamp(-1, 1)
    q = sinkhorn(scores, 0.05, 200)
    torch.testing.assert_close(q.sum(1), torch.ones(60))  # an image's assignment sums to 1
    torch.testing.assert_close(q.sum(0), torch.full((10,), 6.0), rtol=1e-3, atol=0)  # prototypes share the images
    before = scores.clone()
    assert torch.equal(sinkhorn(scores, 0.05, 3, first=7), sinkhorn(scores, 0.05, 3)[:7])
    assert torch.equal(scores, before)
    np.testing.assert_allclose(sinkhorn(scores, 0.05, 3).numpy(), naive_sinkhorn(scores.numpy(), 0.05, 3), rtol=2e-4)


def test_sinkhorn_is_safe_where_exp_would_overflow_or_vanish() -> None:
    torch.manual_seed(0)
    scores = torch.randn(16, 8)
    shifted = sinkhorn(scores + 1000, 0.5, 3)  # exp(2000) is no float
    torch.testing.assert_close(shifted, sinkhorn(scores, 0.5, 3), rtol=2e-3, atol=1e-6)
    assert sinkhorn(scores * 30, 0.01, 3).isfinite().all()
    assert sinkhorn(scores.half(), 0.05, 3).dtype == torch.float32


def test_sixteen_bit_autocast_reaches_the_backbone_only() -> None:
    swav, model = objective(), backbone()
    views = batches(1)[0]
    seen: list[torch.dtype] = []
    model.conv.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = swav.loss(model, views, 0.5)
        features = torch.cat([model(view) for view in views]).float()
    assert set(seen) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    expected, _ = objective().loss(nn.Identity(), list(features.view(4, IMAGES, -1)), 0.5)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


# ---- the parts of a step -------------------------------------------------------------------------------------


def test_prototypes_lie_on_the_sphere_before_every_step_and_rest_at_first() -> None:
    swav, model = objective(), backbone()
    assert isinstance(swav, Objective)
    torch.testing.assert_close(swav.prototypes.weight.norm(dim=1), torch.ones(5))
    optimizer = torch.optim.SGD(swav.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    for step, views in enumerate(batches(6)):
        optimizer.zero_grad()
        swav.before_step(model, 0.0)
        before = swav.prototypes.weight.detach().clone()
        torch.testing.assert_close(before.norm(dim=1), torch.ones(5))
        swav.loss(model, views, step / 6)[0].backward()
        swav.after_backward(model, step / 6)
        optimizer.step()
        moved = not torch.equal(swav.prototypes.weight, before)
        assert moved == (step >= 3)  # frozen for half of the run


def test_views_of_equal_size_share_a_pass() -> None:
    model, seen = backbone(), []
    model.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    views = batches(1)[0]
    features = run_by_size(model, views)
    assert seen == [(8, 3, 8, 8), (8, 3, 4, 4)]
    torch.testing.assert_close(features, torch.cat([model(view) for view in views]))


def test_measuring_leaves_the_queue_alone() -> None:
    swav, model = objective().eval(), backbone()
    swav.loss(model, batches(1)[0], 0.9)
    assert int(swav.queue_filled) == 0


def test_a_queue_that_is_no_multiple_of_the_batch_keeps_the_newest() -> None:
    swav, model = objective(queue_length=6), backbone()
    first, second = batches(2)
    swav.loss(model, first, 0.9)
    held = swav.queue[:, :4].clone()
    assert int(swav.queue_filled) == 4
    swav.loss(model, second, 0.9)
    assert int(swav.queue_filled) == 6
    assert torch.equal(swav.queue[:, 4:], held[:, :2])


def test_a_run_goes_on_exactly_from_its_state() -> None:
    """Stopped while the queue fills, and again once it is used; state goes through a file as checkpoints do."""
    model, run = backbone(), objective()

    def step(swav: SwAV, index: int) -> Tensor:
        swav.before_step(model, 0.0)
        loss, _ = swav.loss(model, batches(8)[index], index / 8)
        return loss.detach()

    for index in range(8):
        if index in (3, 6):
            resumed = objective(seed=9)
            file = io.BytesIO()
            torch.save(run.state_dict(), file)
            file.seek(0)
            resumed.load_state_dict(torch.load(file, weights_only=True))
            losses = [step(resumed, later) for later in range(index, 8)]
            kept = copy.deepcopy(run)
            assert losses == [step(kept, later) for later in range(index, 8)]
            assert torch.equal(resumed.queue, kept.queue)
        step(run, index)


def test_heads_depend_on_their_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = objective(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(first.projector.weight, objective(seed=3).projector.weight)
    assert not torch.equal(first.projector.weight, objective(seed=4).projector.weight)


def test_the_loss_falls_when_it_is_followed() -> None:
    swav, model = objective(queue_length=0, freeze_prototypes=0.1), backbone()
    optimizer = torch.optim.SGD([*model.parameters(), *swav.parameters()], lr=0.3, momentum=0.9)
    torch.manual_seed(0)
    images = torch.randn(16, 3, 8, 8) + torch.randn(16, 3, 1, 1) * 2
    losses = []
    for step in range(60):
        views = [images[..., :size, :size] + 0.1 * torch.randn(16, 3, size, size) for size in SIZES]
        optimizer.zero_grad()
        swav.before_step(model, 0.0)
        loss, _ = swav.loss(model, views, step / 60)
        loss.backward()
        swav.after_backward(model, step / 60)
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])


# ---- two processes -------------------------------------------------------------------------------------------


def _run(views: list[list[Tensor]]) -> dict[str, Tensor]:
    """Five steps of everything there is; gradients averaged over processes, as distributed training does."""
    swav, model = objective(queue_length=16, queue_start=0.2, freeze_prototypes=0.3), backbone()
    parameters = [*model.parameters(), *swav.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    losses = []
    for index, batch in enumerate(views):
        optimizer.zero_grad()
        swav.before_step(model, 0.0)
        loss, health = swav.loss(model, batch, index / len(views))
        loss.backward()
        mean = loss.detach().clone()
        if dist.is_initialized():
            for tensor in [mean, *(p.grad for p in parameters if p.grad is not None)]:
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
        losses.append(mean)
        swav.after_backward(model, index / len(views))
        optimizer.step()
    assert health.more["queue_used"] == 1
    return {**swav.state_dict(), **model.state_dict(), "losses": torch.stack(losses)}


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mine = slice(rank * IMAGES, (rank + 1) * IMAGES)
    state = _run([[view[mine] for view in batch] for batch in batches(6, 2 * IMAGES)])
    torch.save(state, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_equal_one_with_all_images(tmp_path: Path) -> None:
    mp.start_processes(_process, (str(tmp_path),), nprocs=2, start_method=PROCESSES.get_start_method())
    expected = _run(batches(6, 2 * IMAGES))
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"prototypes": 1},
        {"projection": 0},
        {"temperature": 0.0},
        {"epsilon": -1},
        {"epsilon": float("nan")},
        {"iterations": 0},
        {"queue_length": -1},
        {"queue_length": 1.5},
        {"queue_start": 1.1},
        {"freeze_prototypes": "long"},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SwAVConfig(**settings)


def test_too_few_or_unequal_views_are_refused() -> None:
    views = batches(1)[0]
    for wrong in (views[:1], [], [views[0], views[1][:2]]):
        with pytest.raises(ConfigError, match="views"):
            objective().loss(backbone(), wrong, 0.0)
