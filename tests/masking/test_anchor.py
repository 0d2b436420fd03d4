"""Anchored norm statistics: they follow what the mask does, and take back what the images alone would change."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.data import open_images
from selfmask.errors import ConfigError
from selfmask.masking.norms import Anchor

from .architectures import assert_same_state, digits_base, perturb_scores, state_of

# The base is called directly here, on purpose, to compare with.
pytestmark = pytest.mark.filterwarnings("ignore::selfmask.errors.DirectCallWarning")

ANCHORED = MaskConfig(norm="anchored")


def unlike(base: nn.Module) -> nn.Module:
    """Statistics, scales and biases as of a base that was trained on other images."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in base.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.running_mean.copy_(torch.randn(layer.num_features, generator=generator) * 0.2)
                layer.running_var.copy_(torch.rand(layer.num_features, generator=generator) + 0.3)
                if layer.affine:
                    layer.weight.copy_(torch.rand(layer.num_features, generator=generator) + 0.5)
                    layer.bias.copy_(torch.randn(layer.num_features, generator=generator) * 0.2)
    return base.eval()


def digits() -> nn.Module:
    return unlike(digits_base())


def noise(channels: int, size: int, images: int = 6, seed: int = 1) -> Tensor:
    return 0.5 + torch.randn(images, channels, size, size, generator=torch.Generator().manual_seed(seed))


@functools.cache
def clothes(images: int = 32) -> Tensor:
    """Real pictures, as the bundled backbone takes them."""
    preprocessing, pictures = load_backbone("selfmask/tiny").preprocessing, open_images("selfmask/fashion")
    assert preprocessing is not None
    pixels = torch.stack([pictures[i] for i in range(images)]).float() / 255
    return (pixels - torch.tensor(preprocessing.mean).view(3, 1, 1)) / torch.tensor(preprocessing.std).view(3, 1, 1)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "digits": (digits, lambda: noise(1, 8)),
    "resnet18": (lambda: unlike(timm.create_model("resnet18", num_classes=0)), lambda: noise(3, 32)),
    "efficientnet": (lambda: unlike(timm.create_model("tf_efficientnet_lite0", num_classes=0)), lambda: noise(3, 48)),
    "tiny": (lambda: load_backbone("selfmask/tiny").model, clothes),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas hold before statistics are rounded to what files keep of them (tests/maskfile/test_norm_codes.py)."""
    monkeypatch.setattr(MaskedModel, "_as_in_files", lambda *_: {})


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    """One network of each kind, in which no channel dies: where one does, eval mode is not what train mode is."""
    build, images = CASES[request.param]
    torch.manual_seed(0)
    return build(), images()


def statistics(masked: MaskedModel) -> dict[str, Tensor]:
    return {name: value for name, value in state_of(masked.merge_and_unload()).items() if "running_" in name}


def flip(masked: MaskedModel, share: float = 0.1) -> None:
    """Switch some weights of every tensor off."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score[torch.rand(score.shape, generator=generator) < share] = -1.0


def run(masked: MaskedModel, images: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = masked(images)
    return output


def assert_close(found: Tensor, expected: Tensor) -> None:
    """As vectors: single features may be small differences of large numbers."""
    assert float((found - expected).norm()) <= 5e-5 * float(expected.norm())


# ---- what it is to do -------------------------------------------------------------------------------------------


def test_with_all_weights_on_train_mode_is_the_base_in_eval_mode(case: tuple[nn.Module, Tensor]) -> None:
    base, images = case
    before = state_of(base)
    expected = copy.deepcopy(base).eval()(images).detach()
    masked = get_masked_model(base, ANCHORED)
    plain = run(get_masked_model(copy.deepcopy(base)).train(), images)
    masked.anchor([images])
    found = run(masked.train(), images)
    assert_close(found, expected)
    assert float((plain - expected).norm()) > 0.1 * float(expected.norm())  # what is taken back is not small
    assert_same_state(base, before)


def test_recalibrating_an_untrained_mask_leaves_the_bases_statistics(case: tuple[nn.Module, Tensor]) -> None:
    base, images = case
    before = state_of(base)
    masked = get_masked_model(base, ANCHORED)
    masked.anchor([images])
    masked.recalibrate([images])
    for name, value in statistics(masked).items():
        # Within rounding: they are small differences of what large activations come to.
        torch.testing.assert_close(value, before[name], rtol=1e-3, atol=2e-4, msg=name)
    assert_close(run(masked.eval(), images), base(images))
    assert_same_state(base, before)


def test_after_flips_eval_mode_is_train_mode(case: tuple[nn.Module, Tensor]) -> None:
    base, images = case
    before = state_of(base)
    masked = get_masked_model(base, ANCHORED)
    masked.anchor([images])
    flip(masked)
    trained = run(masked.train(), images)
    masked.recalibrate([images])
    assert masked.training
    assert_close(run(masked.eval(), images), trained)
    frozen = masked.frozen(images)
    assert float((trained - frozen).norm()) > 0.01 * float(frozen.norm())  # the mask does something
    assert_same_state(base, before)


def test_a_channel_that_the_mask_kills_is_worth_the_same_in_both_modes() -> None:
    """Whether the base's own variance was smaller than what it sees now, or larger."""
    base = digits()
    with torch.no_grad():
        base[1].running_var[:4] *= 1e-3
        base[1].running_var[4:] *= 1e3
    images = noise(1, 8)
    masked = get_masked_model(base, ANCHORED)
    masked.anchor([images])
    with torch.no_grad():
        next(iter(masked.scores.values()))[::2] = -1.0
    trained = run(masked.train(), images)
    masked.recalibrate([images])
    assert_close(run(masked.eval(), images), trained)
    assert all((value >= 0).all() for name, value in statistics(masked).items() if "var" in name)


def test_averages_over_batches_hold_their_own_across_calls() -> None:
    """Several batches are averaged, layer by layer, and again when recalibrating: the base's statistics stay."""
    masked = get_masked_model(digits(), ANCHORED)
    batches = [noise(1, 8, seed=seed) * seed for seed in (1, 2, 3)]
    masked.anchor(iter(batches))
    masked.recalibrate(batches)
    # The second layer sees a little else: batches are normalised one by one in train mode, together in eval mode.
    assert torch.allclose(statistics(masked)["1.running_mean"], masked.base[1].running_mean, atol=1e-5)
    assert torch.allclose(statistics(masked)["1.running_var"], masked.base[1].running_var, atol=1e-5)


# ---- the formulas -----------------------------------------------------------------------------------------------


def naive_statistics(x: np.ndarray, channel: int) -> tuple[float, float, int]:
    values = x[:, channel].ravel()
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values), len(values)


def test_scales_and_biases_equal_the_formulas() -> None:
    base, batches = digits(), [noise(1, 8, images=3), noise(1, 8, images=3, seed=2)]
    anchor = Anchor(base)
    anchor.measure(base, base, batches)
    found = anchor.in_training(base)
    assert found.keys() == {"1.weight", "1.bias", "4.weight", "4.bias"}
    for name, before in (("1", base[:1]), ("4", base[:4])):
        layer = base.get_submodule(name)
        seen = [before(batch).detach().double().numpy() for batch in batches]
        for channel in range(layer.num_features):
            both = [naive_statistics(x, channel) for x in seen]
            m, v = (sum(part[i] for part in both) / len(both) for i in range(2))
            own_m, own_v = float(layer.running_mean[channel]), float(layer.running_var[channel])
            scale, bias = layer.weight[channel].item(), layer.bias[channel].item()
            spread = (own_v + layer.eps) ** 0.5
            assert float(found[f"{name}.weight"][channel]) == pytest.approx(
                scale * (v + layer.eps) ** 0.5 / spread, rel=1e-4
            )
            assert float(found[f"{name}.bias"][channel]) == pytest.approx(
                bias + scale * (m - own_m) / spread, rel=1e-4, abs=1e-5
            )


def test_statistics_equal_what_a_line_through_both_says() -> None:
    """In train mode a layer maps x to a x + b; the statistics are those with which it does so in eval mode."""
    base, images = digits(), noise(1, 8)
    masked = get_masked_model(base, ANCHORED)
    masked.anchor([images])
    flip(masked, 0.3)
    masked.recalibrate([images])
    found, anchor = statistics(masked), masked._anchor
    assert anchor is not None
    dense, layer = masked.merge_and_unload(), base[1]
    x = dense[0](images).detach().double().numpy()
    trained = anchor.in_training(base)
    for channel in range(8):
        m, v, _ = naive_statistics(x, channel)
        slope = float(trained["1.weight"][channel]) / (v + layer.eps) ** 0.5
        start = float(trained["1.bias"][channel]) - slope * m
        scale, bias = layer.weight[channel].item(), layer.bias[channel].item()
        variance = (scale / slope) ** 2 - layer.eps
        mean = (bias - start) / slope
        assert float(found["1.running_var"][channel]) == pytest.approx(variance, rel=1e-3)
        assert float(found["1.running_mean"][channel]) == pytest.approx(mean, rel=1e-3, abs=1e-4)


def test_without_measuring_it_is_plain_batch_norm() -> None:
    images = noise(1, 8)
    masked = get_masked_model(digits(), ANCHORED).train()
    assert_close(run(masked, images), run(get_masked_model(digits()).train(), images))
    masked.recalibrate([images])
    plain = get_masked_model(digits())
    plain.recalibrate([images])
    for name, value in statistics(plain).items():
        torch.testing.assert_close(statistics(masked)[name], value, rtol=1e-4, atol=1e-5)


# ---- layers of other kinds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4, affine=False),
        # In train mode instance norm looks at each image by itself: no scale and bias take that back.
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    ],
)
def test_layers_that_cannot_be_anchored_keep_the_bases_statistics(layer: nn.Module) -> None:
    base = unlike(nn.Sequential(nn.Conv2d(1, 4, 3), copy.deepcopy(layer), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    images, before = noise(1, 8), state_of(base)
    masked = get_masked_model(base, ANCHORED)
    masked.anchor([images])
    assert_close(run(masked.train(), images).flatten(1), masked.frozen(images).flatten(1))
    assert not base[1].training
    assert base[3].training
    flip(masked)
    trained = run(masked, images)
    masked.recalibrate([images])
    assert_close(run(masked.eval(), images).flatten(1), trained.flatten(1))
    found = statistics(masked)
    assert all(torch.equal(found[name], before[name]) for name in found if name.startswith("1."))
    assert not torch.equal(found["3.running_mean"], before["3.running_mean"])


def test_models_without_batch_norm_work() -> None:
    base = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
    images = noise(1, 8)
    masked = get_masked_model(base, ANCHORED)
    masked.anchor([images])
    masked.recalibrate([images])
    assert torch.equal(run(masked.train(), images), masked.frozen(images))
    flip(masked, 0.3)
    assert torch.equal(run(masked.train(), images), run(masked.eval(), images))


class Aside(nn.Module):
    """One norm layer is run twice, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.twice, self.never = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return (self.twice(x) + self.twice(x.flip(0))).flatten(1)


def test_layers_run_twice_or_never() -> None:
    base, images = unlike(Aside()), noise(1, 8)
    masked = get_masked_model(base, ANCHORED)
    masked.anchor([images])
    assert_close(run(masked.train(), images), masked.frozen(images))
    masked.recalibrate([images])
    for name, value in statistics(masked).items():
        torch.testing.assert_close(value, base.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_views_of_two_sizes_in_train_mode() -> None:
    base = unlike(timm.create_model("resnet18", num_classes=0, channels=(8, 8, 16, 16)))
    large, small = noise(3, 48, images=8), noise(3, 32, images=8, seed=2)
    before = state_of(base)
    masked = get_masked_model(base, ANCHORED).train()
    masked.anchor([large])
    kept = statistics(masked)
    out = torch.cat([masked(large), masked(small)])
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(score.grad is not None and score.grad.isfinite().all() for score in masked.scores.parameters())
    assert all(torch.equal(value, kept[name]) for name, value in statistics(masked).items())
    assert_same_state(base, before)


def test_a_channel_that_does_not_vary_is_not_blown_up() -> None:
    base, images = digits(), torch.zeros(4, 1, 8, 8)
    images[0, 0, 0, 0] = 1e-4
    masked = get_masked_model(base, ANCHORED)
    masked.anchor([images])
    assert_close(run(masked.train(), images), masked.frozen(images))
    flip(masked)
    masked.recalibrate([images])
    assert all(value.isfinite().all() for value in statistics(masked).values())
    assert all((value >= 0).all() for name, value in statistics(masked).items() if "var" in name)


# ---- copies, files ------------------------------------------------------------------------------------------------


def trained_one() -> tuple[MaskedModel, Tensor]:
    """Anchored, flipped, recalibrated."""
    masked, images = get_masked_model(digits(), ANCHORED), noise(1, 8)
    masked.anchor([images])
    perturb_scores(masked)
    masked.recalibrate([images])
    return masked, images


@pytest.mark.parametrize("training", [False, True])
def test_state_and_copies_give_the_same_outputs(training: bool) -> None:
    masked, images = trained_one()
    expected = run(masked.train(training), images)
    file = io.BytesIO()
    torch.save(masked.state_dict(), file)
    file.seek(0)
    fresh = get_masked_model(unlike(digits_base(seed=4)), ANCHORED)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(run(fresh.train(training), images), expected)
    copied = copy.deepcopy(masked)
    assert torch.equal(run(copied, images), expected)
    flip(copied, 0.5)
    copied.anchor([images * 2])
    assert torch.equal(run(masked, images), expected)  # the copy has an anchor of its own
    fresh.recalibrate([images])
    masked.recalibrate([images])
    assert all(torch.equal(value, statistics(masked)[name]) for name, value in statistics(fresh).items())


@pytest.mark.parametrize("is_trainable", [False, True])
def test_files_give_the_same_outputs(tmp_path: Path, is_trainable: bool) -> None:
    masked, images = trained_one()
    expected = run(masked.eval(), images)
    masked.save_pretrained(tmp_path / "anchored.smn")
    loaded = MaskedModel.from_pretrained(digits(), tmp_path / "anchored.smn", is_trainable=is_trainable).eval()
    assert torch.equal(run(loaded, images), expected)
    assert loaded.config == ANCHORED
    torch.testing.assert_close(masked.merge_and_unload().eval()(images).detach(), expected)
    if is_trainable:
        loaded.anchor([images])
        assert_close(run(loaded.train(), images), run(masked.train(), images))


def test_another_type_of_numbers() -> None:
    masked, images = trained_one()
    expected = run(masked.train(), images)
    found = run(masked.double(), images.double())
    assert found.dtype == torch.float64
    assert_close(found.float(), expected)


# ---- the frozen base ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["adapt", "frozen", "anchored"])
@pytest.mark.parametrize("training", [False, True])
def test_frozen_is_the_base_in_eval_mode(norm: str, training: bool) -> None:
    base = unlike(nn.Sequential(digits_base()[:-1], nn.Dropout(0.5)))
    images, before = noise(1, 8), state_of(base)
    expected = copy.deepcopy(base).eval()(images).detach()
    masked = get_masked_model(base, MaskConfig(norm=norm)).train(training)
    flip(masked, 0.5)
    modes = [module.training for module in masked.modules()]
    found = masked.frozen(images)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert [module.training for module in masked.modules()] == modes
    assert_same_state(base, before)
    with pytest.raises(RuntimeError):
        masked.frozen(images[:, :, :0])
    assert [module.training for module in masked.modules()] == modes


def test_modes_of_layers() -> None:
    masked = get_masked_model(digits(), ANCHORED)
    assert not masked.training
    assert not masked.base[1].training
    masked.train()
    assert all(module.training for module in masked.base.modules())
    masked.anchor([noise(1, 8)])
    masked.recalibrate([noise(1, 8)])
    assert all(module.training for module in masked.base.modules())
    assert masked.base[1].momentum == 0.1
    assert not masked.base[1]._forward_pre_hooks


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["all", ["1.bias"], ["0.weight", "4.*"]])
def test_a_mask_on_norm_layers_is_refused(select: str | list[str]) -> None:
    base = digits()
    with pytest.raises(ConfigError, match="norm layers"):
        get_masked_model(base, MaskConfig(norm="anchored", select=select))
    assert all(parameter.requires_grad for parameter in base.parameters())


def test_the_papers_selection_is_refused_for_its_downsample_norms() -> None:
    base = timm.create_model("resnet18", num_classes=0, channels=(8, 8, 16, 16))
    with pytest.raises(ConfigError, match="downsample"):
        get_masked_model(base, MaskConfig(norm="anchored", select="paper-resnet"))


def test_anchors_that_cannot_be() -> None:
    for norm in ("adapt", "frozen", "recalibrate"):
        with pytest.raises(ConfigError, match="anchored"):
            get_masked_model(digits(), MaskConfig(norm=norm)).anchor([noise(1, 8)])
    masked, images = trained_one()
    expected = run(masked.train(), images)
    with pytest.raises(ConfigError, match="at least one batch"):
        masked.anchor([])

    def broken() -> object:
        yield images * 3
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        masked.anchor(broken())
    assert torch.equal(run(masked, images), expected)  # an error on the way changes nothing
    assert not masked.base[1]._forward_pre_hooks
