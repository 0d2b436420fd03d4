"""From scores to effective weights: the rules, alpha, its gradient, and masks over a fraction of the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import ConfigError

from .architectures import named_scores, perturb_scores

quick = settings(max_examples=60, deadline=None, derandomize=True)


def linear(rows: int = 6, columns: int = 10, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Fed with the identity, it returns its weight, transposed: the effective weight as a user meets it."""
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias=False, dtype=dtype)


def effective(masked: MaskedModel) -> Tensor:
    weight = masked.base.weight
    with torch.no_grad():
        return masked(torch.eye(weight.shape[1], dtype=weight.dtype)).T


def with_scores(masked: MaskedModel, scores: object) -> MaskedModel:
    with torch.no_grad():
        masked.scores["weight"].copy_(torch.as_tensor(scores))
    return masked


def dense(weight: Tensor, mask: np.ndarray) -> np.ndarray:
    """W * M / alpha in numpy, in float64."""
    w = weight.detach().double().numpy()
    share = mask.mean()
    return w * mask / np.sqrt(share) if share else np.zeros_like(w)


# Few distinct values, so that ties and scores on the threshold are common.
score_arrays = hnp.arrays(np.float32, (6, 10), elements=st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 1.0, 3.0]))
shares = st.floats(0, 1)


def highest(scores: np.ndarray, share: float) -> np.ndarray:
    """Of the share highest scores, by a stable sort: among equals the first ones win."""
    flat = scores.ravel()
    mask = np.zeros(flat.size, bool)
    mask[np.argsort(-flat, kind="stable")[: round(share * flat.size)]] = True
    return mask.reshape(scores.shape)


@quick
@given(scores=score_arrays, mu=st.sampled_from([-1.0, 0.0, 0.25, 5.0]))
def test_threshold_is_strict(scores: np.ndarray, mu: float) -> None:
    masked = with_scores(get_masked_model(linear(), MaskConfig(mu=mu)), scores)
    np.testing.assert_allclose(effective(masked), dense(masked.base.weight, scores > mu), rtol=1e-6)
    assert masked.sparsity() == {"weight": (scores > mu).mean(), "total": (scores > mu).mean()}


@quick
@given(scores=score_arrays, share=shares)
def test_topk_keeps_exactly_k(scores: np.ndarray, share: float) -> None:
    masked = with_scores(get_masked_model(linear(), MaskConfig(rule="topk", active_share=share)), scores)
    mask = highest(scores, share)
    assert mask.sum() == round(share * 60)
    np.testing.assert_allclose(effective(masked), dense(masked.base.weight, mask), rtol=1e-6)


@quick
@given(scores=score_arrays, share=shares, progress=st.floats(0, 1))
def test_progressive_share_falls_linearly(scores: np.ndarray, share: float, progress: float) -> None:
    config = MaskConfig(rule="progressive_topk", active_share=share)
    masked = with_scores(get_masked_model(linear(), config), scores)
    masked.progress = progress
    on = int((effective(masked) != 0).sum())
    assert abs(on - 60 * (1 - progress * (1 - share))) <= 0.5 + 1e-6
    kept = highest(scores, on / 60)
    np.testing.assert_array_equal(effective(masked) != 0, kept)


def test_progress_from_all_to_the_target() -> None:
    masked = get_masked_model(linear(10, 10), MaskConfig(rule="progressive_topk", active_share=0.2))
    perturb_scores(masked)
    shares_seen = []
    for step in range(11):
        masked.progress = step / 10
        shares_seen.append(masked.sparsity()["total"])
    assert shares_seen == pytest.approx(np.linspace(1, 0.2, 11).tolist())


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_progress_out_of_range(value: float) -> None:
    masked = get_masked_model(linear(), MaskConfig(rule="progressive_topk"))
    with pytest.raises(ConfigError, match="progress"):
        masked.progress = value
    assert masked.progress == 0


def test_progress_is_of_the_progressive_rule_alone() -> None:
    masked = get_masked_model(linear(), MaskConfig(rule="topk", active_share=0.5))
    before = effective(masked)
    masked.progress = 1.0
    assert torch.equal(effective(masked), before)


def test_ties_are_decided_alike_every_time() -> None:
    """All scores are equal at a constant start: two models, and a reload, must agree on who stays."""
    config = MaskConfig(rule="topk", active_share=0.3, score_init="constant")
    first, second = (effective(get_masked_model(linear(), config)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first.flatten()[:18] != 0, torch.ones(18, dtype=torch.bool))
    assert not first.flatten()[18:].any()


def test_kaiming_start() -> None:
    """U(-1, 1) / sqrt(fan in), which is Kaiming's with a = sqrt(5); seeded; also for tensors of one dimension."""
    base = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Linear(500, 40))
    scores = named_scores(get_masked_model(base, MaskConfig(rule="topk")))
    for name, fan_in in (("0.weight", 72), ("1.weight", 500), ("0.bias", 32), ("1.bias", 40)):
        bound = fan_in**-0.5
        assert scores[name].abs().max() <= bound
        assert scores[name].abs().max() > 0.85 * bound
    assert scores["1.weight"].std().item() == pytest.approx(500**-0.5 / 3**0.5, rel=0.03)
    assert scores["1.weight"].mean().item() == pytest.approx(0, abs=2e-3)
    again = named_scores(get_masked_model(base, MaskConfig(rule="topk")))
    other = named_scores(get_masked_model(base, MaskConfig(rule="topk", seed=1)))
    assert all(torch.equal(again[name], score) for name, score in scores.items())
    assert not any(torch.equal(other[name], score) for name, score in scores.items())


def test_kaiming_start_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    base = nn.Linear(4, 4)
    torch.manual_seed(5)
    get_masked_model(base, MaskConfig(rule="topk"))
    assert torch.equal(torch.rand(3), expected)


def test_default_start() -> None:
    assert MaskConfig(rule="threshold").score_init == "constant"
    assert MaskConfig(rule="progressive_topk").score_init == "kaiming"
    assert MaskConfig(rule="topk").score_init == "kaiming"
    masked = get_masked_model(linear(), MaskConfig(s0=0.25))
    assert torch.equal(masked.scores["weight"], torch.full((6, 10), 0.25))


@pytest.mark.parametrize(
    "config",
    [
        MaskConfig(s0=-1.0),
        MaskConfig(rule="topk", active_share=0.0),
        MaskConfig(rule="topk", active_share=0.001),  # rounds to no weight at all
    ],
)
@pytest.mark.parametrize("detach_alpha", [False, True])
def test_all_off_gives_zeros_and_never_nan(config: MaskConfig, detach_alpha: bool, tmp_path: Path) -> None:
    config = MaskConfig.from_dict(config.to_dict() | {"detach_alpha": detach_alpha})
    masked = get_masked_model(nn.Sequential(linear(), nn.ReLU(), linear(4, 6)), config)
    x = torch.randn(3, 10)
    output = masked(x)
    assert torch.equal(output, torch.zeros(3, 4))
    (output + 1).square().sum().backward()
    assert all(torch.isfinite(score.grad).all() for score in masked.scores.parameters())
    masked.save_pretrained(tmp_path / "off.smn")
    loaded = MaskedModel.from_pretrained(nn.Sequential(linear(), nn.ReLU(), linear(4, 6)), tmp_path / "off.smn")
    assert torch.equal(loaded(x), torch.zeros(3, 4))
    assert torch.equal(masked.merge_and_unload()(x), torch.zeros(3, 4))
    assert masked.sparsity()["total"] == 0


@pytest.mark.parametrize("detach_alpha", [False, True])
def test_scores_of_a_tensor_with_all_weights_off_can_come_back(detach_alpha: bool) -> None:
    """Each score learns what its weight alone would do: the loss with it, at alpha = sqrt(1/n), less that of none."""
    masked = get_masked_model(linear(), MaskConfig(s0=-1.0, detach_alpha=detach_alpha))
    x, towards = torch.randn(8, 10), torch.randn(8, 6)
    (masked(x) * towards).sum().backward()  # linear, so that the difference is the derivative
    alone = [
        (F.linear(x, torch.zeros(60).index_fill(0, torch.tensor([i]), 1).view(6, 10) * masked.base.weight * 60**0.5))
        for i in range(60)
    ]
    expected = torch.stack([(output * towards).sum() for output in alone]).view(6, 10)
    torch.testing.assert_close(masked.scores["weight"].grad, expected, rtol=1e-4, atol=1e-4)


def test_one_weight_left() -> None:
    """The other end of alpha: a single weight, scaled by sqrt(n)."""
    scores = torch.full((6, 10), -1.0)
    scores[2, 3] = 1
    masked = with_scores(get_masked_model(linear(), MaskConfig()), scores)
    expected = torch.zeros(6, 10)
    expected[2, 3] = masked.base.weight[2, 3] * 60**0.5
    torch.testing.assert_close(effective(masked), expected)


def loss_of_mask(weight: np.ndarray, x: np.ndarray, mask: np.ndarray, alpha: float | None = None) -> float:
    """A loss as a function of a mask of any real numbers; with alpha fixed where one is given."""
    scale = np.sqrt(mask.mean()) if alpha is None else alpha
    return float(np.sum(np.sin(x @ (weight * mask / scale).T)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("detach_alpha", [False, True])
def test_gradient_is_the_derivative_by_the_mask(detach_alpha: bool, dtype: torch.dtype) -> None:
    """Against central differences: the total derivative dL/dM by default, with alpha held fixed on request."""
    base = linear(dtype=dtype)
    masked = get_masked_model(base, MaskConfig(detach_alpha=detach_alpha))
    perturb_scores(masked, spread=2.0)
    x = torch.randn(5, 10, dtype=dtype)
    masked(x).sin().sum().backward()

    weight, inputs = base.weight.detach().double().numpy(), x.double().numpy()
    mask = (masked.scores["weight"].detach().numpy() > 0).astype(float)
    assert 0 < mask.mean() < 1
    alpha = np.sqrt(mask.mean()) if detach_alpha else None
    expected = np.empty_like(mask)
    for index in np.ndindex(mask.shape):
        step = np.zeros_like(mask)
        step[index] = 1e-5
        up, down = (loss_of_mask(weight, inputs, mask + sign * step, alpha) for sign in (1, -1))
        expected[index] = (up - down) / 2e-5
    found = masked.scores["weight"].grad
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    # the two derivatives are far apart: a test that could not tell them would pass for the wrong one
    other = loss_gradient(weight, inputs, mask, detach=not detach_alpha)
    assert np.abs(found.numpy() - other).max() > 100 * np.abs(found.numpy() - expected).max()


def loss_gradient(weight: np.ndarray, x: np.ndarray, mask: np.ndarray, *, detach: bool) -> np.ndarray:
    alpha = np.sqrt(mask.mean())
    outer = np.cos(x @ (weight * mask / alpha).T).T @ x
    direct = outer * weight / alpha
    return direct if detach else direct - (outer * weight * mask).sum() / (2 * mask.size * alpha**3)


# ---- masks over a fraction of the weights ---------------------------------------------------------------------


def chosen_by_decay(masked: MaskedModel) -> np.ndarray:
    """Which weights carry a score: weight decay below the threshold switches off all that can be switched off."""
    optimizer = torch.optim.SGD(masked.scores.parameters(), lr=1.0, weight_decay=1.5)
    optimizer.zero_grad()
    (0 * masked(torch.eye(masked.base.weight.shape[1])).sum()).backward()
    optimizer.step()  # every score is now -0.5
    return (effective(masked) == 0).numpy()


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan"), "half"])
def test_a_fraction_that_leaves_nothing_or_makes_no_sense_is_refused(fraction: object) -> None:
    with pytest.raises(ConfigError, match="fraction"):
        MaskConfig(fraction=fraction)  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_random_fraction(fraction: float) -> None:
    """The others stay on even under weight decay, and are not counted."""
    masked = get_masked_model(linear(100, 100), MaskConfig(fraction=fraction))
    count = masked.num_masked
    chosen = chosen_by_decay(masked)
    assert chosen.sum() == count
    assert chosen.mean() == pytest.approx(fraction, abs=4 * (fraction * (1 - fraction) / 1e4) ** 0.5)
    # no preference for large weights, rows or columns
    magnitude = masked.base.weight.detach().abs().numpy()
    assert magnitude[chosen].mean() == pytest.approx(magnitude.mean(), rel=0.1)
    assert chosen.mean(0).max() < fraction + 0.25
    assert chosen.mean(1).max() < fraction + 0.25


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.8])
def test_magnitude_fraction(fraction: float) -> None:
    masked = get_masked_model(linear(20, 30), MaskConfig(fraction=fraction, fraction_by="magnitude"))
    assert masked.num_masked == round(fraction * 600)
    chosen = chosen_by_decay(masked)
    np.testing.assert_array_equal(chosen, highest(masked.base.weight.detach().abs().numpy(), fraction))


def test_random_choice_is_seeded_and_differs_by_tensor() -> None:
    def choice(seed: int) -> np.ndarray:
        return chosen_by_decay(get_masked_model(linear(40, 40), MaskConfig(fraction=0.5, seed=seed)))

    np.testing.assert_array_equal(choice(3), choice(3))
    assert 0.4 < np.mean(choice(3) != choice(4)) < 0.6

    pair = nn.Sequential(linear(40, 40), linear(40, 40))
    masked = get_masked_model(pair, MaskConfig(fraction=0.5, s0=-1.0))  # all that can be off is off
    with torch.no_grad():
        dense_pair = masked.merge_and_unload()
    assert 0.4 < float(((dense_pair[0].weight == 0) != (dense_pair[1].weight == 0)).float().mean()) < 0.6


def test_random_choice_never_changes() -> None:
    """A mask file stores no choice, only its seed: this very one is part of the format (docs/format.md)."""
    chosen = chosen_by_decay(get_masked_model(linear(4, 8), MaskConfig(fraction=0.5, seed=7)))
    expected = splitmix_choice("7:weight", 32, 0.5)
    np.testing.assert_array_equal(chosen.ravel(), expected)


def splitmix_choice(key: str, n: int, fraction: float) -> list[bool]:
    """SplitMix64 with Python's whole numbers, seeded by the first 8 bytes of a SHA-256."""
    import hashlib

    wrap = (1 << 64) - 1
    state = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    chosen = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & wrap
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
        z ^= z >> 31
        chosen.append((z >> 11) < round(fraction * 2**53))
    return chosen


@pytest.mark.parametrize("fraction_by", ["random", "magnitude"])
@pytest.mark.parametrize("rule", ["threshold", "topk", "progressive_topk"])
def test_fraction_with_every_rule(rule: str, fraction_by: str, tmp_path: Path) -> None:
    """Shares are counted among the chosen; alpha among all weights, for those left alone are on."""
    config = MaskConfig(
        rule=rule, fraction=0.4, fraction_by=fraction_by, active_share=0.5, score_init="constant", seed=1
    )
    base = linear(30, 30)
    masked = get_masked_model(base, config)
    perturb_scores(masked)
    masked.progress = 1.0
    choice = get_masked_model(linear(30, 30), MaskConfig(fraction=0.4, fraction_by=fraction_by, seed=1))
    chosen = chosen_by_decay(choice)
    scores = masked.scores["weight"].detach().numpy()
    mask = np.ones((30, 30), bool)
    if rule == "threshold":
        mask[chosen] = scores[chosen] > 0
    else:
        mask[chosen] = highest(scores[chosen], 0.5)
    np.testing.assert_allclose(effective(masked), dense(base.weight, mask), rtol=1e-6)
    assert masked.sparsity()["total"] == pytest.approx(mask[chosen].mean())

    masked.save_pretrained(tmp_path / "part.smn")
    loaded = MaskedModel.from_pretrained(linear(30, 30), tmp_path / "part.smn")
    assert loaded.num_masked == masked.num_masked == chosen.sum()
    assert torch.equal(effective(loaded), effective(masked))
    trainable = MaskedModel.from_pretrained(linear(30, 30), tmp_path / "part.smn", is_trainable=True)
    assert trainable.num_masked == masked.num_masked
    assert torch.equal(effective(trainable), effective(masked))


@pytest.mark.parametrize("fraction_by", ["random", "magnitude"])
def test_fraction_makes_the_file_smaller(fraction_by: str, tmp_path: Path) -> None:
    sizes = {}
    for fraction in (1.0, 0.5, 0.1):
        masked = get_masked_model(linear(200, 200), MaskConfig(fraction=fraction, fraction_by=fraction_by, s0=0.0))
        perturb_scores(masked)  # half of the bits on: nothing can be compressed
        sizes[fraction] = masked.save_pretrained(tmp_path / "mask.smn")
    assert sizes[1.0] - sizes[0.5] == pytest.approx(0.5 * 40_000 / 8, rel=0.1)
    assert sizes[0.5] - sizes[0.1] == pytest.approx(0.4 * 40_000 / 8, rel=0.1)


def test_gradient_with_a_fraction_is_that_of_the_whole_mask() -> None:
    """Unchosen weights take part in alpha."""
    base = linear(8, 8)
    masked = get_masked_model(base, MaskConfig(fraction=0.5, s0=0.5))
    perturb_scores(masked)
    x = torch.randn(4, 8)
    masked(x).sin().sum().backward()
    mask = (effective(masked) != 0).numpy().astype(float)
    expected = loss_gradient(base.weight.detach().double().numpy(), x.double().numpy(), mask, detach=False)
    chosen = chosen_by_decay(get_masked_model(linear(8, 8), MaskConfig(fraction=0.5)))
    np.testing.assert_allclose(masked.scores["weight"].grad.numpy()[chosen], expected[chosen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "magic"},
        {"active_share": 1.5},
        {"active_share": float("nan")},
        {"fraction": -0.1},
        {"fraction": "half"},
        {"fraction_by": "luck"},
        {"score_init": "zeros"},
        {"mu": float("inf")},
        {"s0": None},
        {"seed": -1},
        {"seed": 1.5},
        {"norm": "maybe"},
        {"select": 3},
        {"select": [1]},
        {"exclude": "fc.*"},
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        MaskConfig(**settings)


def test_config_round_trip() -> None:
    config = MaskConfig(rule="topk", active_share=0.3, select=["a.*"], exclude=["b"], seed=5, norm="frozen")
    assert MaskConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="unknown"):
        MaskConfig.from_dict({"rulez": "topk"})
