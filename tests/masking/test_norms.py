"""Batch-norm statistics belong to the mask: they move, stay, or are re-estimated, and the base keeps its own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import ConfigError, SelfmaskError, WrongBaseError
from selfmask.maskfile import inspect_mask_file

from .architectures import assert_same_state, digits_base, perturb_scores, state_of

# The base is called directly here, on purpose, to compare with.
pytestmark = pytest.mark.filterwarnings("ignore::selfmask.errors.DirectCallWarning")


def batches(n: int = 4, seed: int = 0, size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(size, 1, 8, 8, generator=generator) + i for i in range(n)]


def statistics(masked: MaskedModel) -> dict[str, Tensor]:
    """The statistics a user gets with the mask: those of the merged model, rounded as in files."""
    return {name: value for name, value in state_of(masked.merge_and_unload()).items() if "running_" in name}


def exact(masked: MaskedModel) -> dict[str, Tensor]:
    """Those that training goes on from, before they are rounded."""
    return {name: value for name, value in masked._statistics("default").items() if "running_" in name}


def pretrained() -> nn.Module:
    """A base that has seen data: statistics, and a count of batches."""
    base = digits_base().train()
    with torch.no_grad():
        for x in batches(3, seed=9):
            base(x)
    return base


def assert_statistics_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def assert_rounded(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Half a step of the code of a file away, at most."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        variance = expected[name.replace("running_mean", "running_var")]
        step = variance.sqrt() if name.endswith("running_mean") else variance
        assert bool(((found[name] - value).abs() <= (step + 1e-3) / 250).all()), name


# ---- adapt ------------------------------------------------------------------------------------------------------


def test_adapt_moves_ours_and_not_the_bases() -> None:
    """In train mode, as batch norm does: an exponential average from where the base stood."""
    base = pretrained()
    before, plain = state_of(base), copy.deepcopy(base)
    masked = get_masked_model(base).train()
    for x in batches():
        masked(x)
        plain(x)
    expected = {name: value for name, value in plain.state_dict().items() if "running_" in name}
    assert all(torch.equal(value, expected[name]) for name, value in exact(masked).items())
    assert_rounded(statistics(masked), expected)
    assert not torch.equal(expected["1.running_mean"], before["1.running_mean"])
    assert_same_state(base, before)
    merged = masked.merge_and_unload()
    assert merged[1].num_batches_tracked == plain[1].num_batches_tracked == 7


def test_eval_mode_moves_nothing() -> None:
    masked = get_masked_model(pretrained()).eval()
    before = statistics(masked)
    x = batches(1)[0]
    assert torch.equal(masked(x), pretrained().eval()(x))
    assert all(torch.equal(value, before[name]) for name, value in statistics(masked).items())


def test_adapted_statistics_come_with_the_file(tmp_path: Path) -> None:
    masked = get_masked_model(pretrained()).train()
    for x in batches():
        masked(x)
    masked.eval().save_pretrained(tmp_path / "adapt.smn")
    for is_trainable in (False, True):
        loaded = MaskedModel.from_pretrained(pretrained(), tmp_path / "adapt.smn", is_trainable=is_trainable).eval()
        assert all(torch.equal(value, statistics(masked)[name]) for name, value in statistics(loaded).items())
        assert torch.equal(loaded(x), masked(x))


def test_a_base_with_other_statistics_is_another(tmp_path: Path) -> None:
    """The mask brings its own, but what it is compared with, the frozen backbone, would not be the same."""
    masked = get_masked_model(pretrained()).train()
    masked(batches(1)[0])
    masked.eval().save_pretrained(tmp_path / "adapt.smn")
    other = pretrained()
    other[1].running_mean.add_(1)
    with pytest.raises(WrongBaseError, match="another beside them"):
        MaskedModel.from_pretrained(other.eval(), tmp_path / "adapt.smn")


def test_each_mask_has_its_own_statistics(tmp_path: Path) -> None:
    masked = get_masked_model(pretrained()).train()
    masked(batches(1)[0])
    masked.save_pretrained(tmp_path / "one.smn")
    first = statistics(masked)
    masked(batches(1, seed=5)[0] * 3)
    masked.load_mask(tmp_path / "one.smn", "one")
    second = statistics(masked)
    masked.set_mask("one")
    assert all(torch.equal(value, first[name]) for name, value in statistics(masked).items())
    masked.set_mask("default")
    assert all(torch.equal(value, second[name]) for name, value in statistics(masked).items())
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])


def test_a_loaded_mask_in_train_mode_changes_nobody(tmp_path: Path) -> None:
    """Batch statistics are used, as train mode says, but what was loaded stays what was saved."""
    get_masked_model(pretrained()).save_pretrained(tmp_path / "mask.smn")
    base = pretrained()
    masked = MaskedModel.from_pretrained(base, tmp_path / "mask.smn").train()
    before, base_before = statistics(masked), state_of(base)
    x = batches(1)[0]
    assert torch.equal(masked(x), pretrained().train()(x))
    assert_same_state(base, base_before)
    assert all(torch.equal(value, before[name]) for name, value in statistics(masked).items())


def test_a_norm_layer_in_two_places() -> None:
    """A block that is used twice has one set of statistics, which both uses move; the base keeps its own."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1))
    base = nn.Sequential(block, nn.ReLU(), block)
    before, plain = state_of(base), copy.deepcopy(base).train()
    buffer = block[1].running_mean
    masked = get_masked_model(base).train()
    for x in batches():
        assert torch.equal(masked(x), plain(x))
    assert_same_state(base, before)
    assert block[1].running_mean is buffer
    assert torch.equal(exact(masked)["0.1.running_mean"], plain[0][1].running_mean)
    merged = masked.merge_and_unload()
    assert torch.equal(merged[0][1].running_mean, merged[2][1].running_mean)


def test_batch_norm_without_statistics() -> None:
    base = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    masked = get_masked_model(base, MaskConfig(norm="frozen")).train()
    x = batches(1)[0]
    assert torch.equal(masked(x), base(x))


def test_a_network_without_norms(tmp_path: Path) -> None:
    for norm in ("adapt", "frozen"):
        base = nn.Sequential(nn.Linear(4, 4))
        masked = get_masked_model(base, MaskConfig(norm=norm))
        masked.save_pretrained(tmp_path / "plain.smn")
        assert MaskedModel.from_pretrained(base, tmp_path / "plain.smn").num_masked == 20


# ---- frozen -----------------------------------------------------------------------------------------------------


def test_frozen_uses_the_bases_statistics_in_train_mode() -> None:
    base = pretrained()
    masked = get_masked_model(base, MaskConfig(norm="frozen"))
    before, expected = statistics(masked), copy.deepcopy(base).eval()
    for x in batches():
        assert torch.equal(masked.train()(x), expected(x))
        assert torch.equal(masked.eval()(x), expected(x))
    assert all(torch.equal(value, before[name]) for name, value in statistics(masked).items())
    assert not any(layer.training for layer in base.modules() if isinstance(layer, nn.BatchNorm2d))
    assert masked.train().training


def test_frozen_leaves_other_layers_in_train_mode() -> None:
    base = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    masked = get_masked_model(base, MaskConfig(norm="frozen")).train()
    assert base[2].training
    assert (masked(batches(1)[0]) == 0).float().mean() > 0.3


def test_frozen_stores_no_statistics_and_checks_the_bases(tmp_path: Path) -> None:
    sizes = {}
    for norm in ("adapt", "frozen"):
        masked = get_masked_model(pretrained(), MaskConfig(norm=norm))
        perturb_scores(masked)
        masked.eval().save_pretrained(tmp_path / f"{norm}.smn")
        sizes[norm] = inspect_mask_file(tmp_path / f"{norm}.smn")[1]["norm"]
    assert sizes["adapt"] > sizes["frozen"] == 0
    x = batches(1)[0]
    loaded = MaskedModel.from_pretrained(pretrained(), tmp_path / "frozen.smn")
    assert torch.equal(loaded.eval()(x), masked(x))
    assert torch.equal(loaded.train()(x), masked(x))  # still frozen

    other = pretrained()
    other[4].running_var.mul_(1.01)
    with pytest.raises(WrongBaseError, match="statistics"):
        MaskedModel.from_pretrained(other, tmp_path / "frozen.smn")


def test_frozen_can_be_trained_further(tmp_path: Path) -> None:
    masked = get_masked_model(pretrained(), MaskConfig(norm="frozen"))
    masked.save_pretrained(tmp_path / "frozen.smn")
    again = MaskedModel.from_pretrained(pretrained(), tmp_path / "frozen.smn", is_trainable=True).train()
    x = batches(1)[0]
    assert torch.equal(again(x), pretrained().eval()(x))
    again.save_pretrained(tmp_path / "again.smn")
    MaskedModel.from_pretrained(pretrained(), tmp_path / "again.smn")


def test_frozen_statistics_cannot_be_recalibrated(tmp_path: Path) -> None:
    """A file that stores no statistics could not keep them, and would fit no base."""
    masked = get_masked_model(pretrained(), MaskConfig(norm="frozen"))
    before = statistics(masked)
    with pytest.raises(ConfigError, match="frozen"):
        masked.recalibrate(batches())
    masked.save_pretrained(tmp_path / "frozen.smn")
    loaded = MaskedModel.from_pretrained(pretrained(), tmp_path / "frozen.smn")
    with pytest.raises(ConfigError, match="frozen"):
        loaded.recalibrate(batches())
    assert all(torch.equal(value, before[name]) for name, value in statistics(masked).items())


# ---- recalibrate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["recalibrate", "adapt"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_recalibrate_is_update_bn_of_the_dense_model(loaded: bool, training: bool, norm: str, tmp_path: Path) -> None:
    """The plain mean over batches, as torch's own update_bn computes it, whatever stood there before."""
    base = pretrained()
    before = state_of(base)
    masked = get_masked_model(base, MaskConfig(norm=norm))
    perturb_scores(masked)
    masked.train()(batches(1, seed=7)[0])
    if loaded:
        masked.save_pretrained(tmp_path / "mask.smn")
        masked = MaskedModel.from_pretrained(base, tmp_path / "mask.smn")
    masked.train(training)
    dense = masked.merge_and_unload()
    update_bn(batches(), dense)

    masked.recalibrate(batches())
    expected = {name: value for name, value in dense.state_dict().items() if "running_" in name}
    assert_rounded(statistics(masked), expected)
    if not loaded:
        assert_statistics_close(exact(masked), expected)
    assert masked.training == training
    assert [layer.momentum for layer in base.modules() if isinstance(layer, nn.BatchNorm2d)] == [0.1, 0.1]
    assert_same_state(base, before)
    masked.save_pretrained(tmp_path / "again.smn")
    again = MaskedModel.from_pretrained(base, tmp_path / "again.smn")
    assert all(torch.equal(value, statistics(masked)[name]) for name, value in statistics(again).items())


def test_recalibrate_by_hand() -> None:
    """The first layer's statistics, straight from its definition."""
    masked = get_masked_model(pretrained())
    perturb_scores(masked)
    masked.recalibrate(batches())
    outputs = [masked.merge_and_unload()[0](x).detach() for x in batches()]
    found = exact(masked)
    mean = torch.stack([out.mean((0, 2, 3)) for out in outputs]).mean(0)
    variance = torch.stack([out.var((0, 2, 3), correction=1) for out in outputs]).mean(0)
    torch.testing.assert_close(found["1.running_mean"], mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["1.running_var"], variance, rtol=1e-4, atol=1e-5)


def test_recalibrate_takes_what_loaders_give() -> None:
    """Tensors, or tuples and lists with labels; from an iterator too."""
    results = []
    for wrap in (lambda x: x, lambda x: (x, 3), lambda x: [x, "label"]):
        masked = get_masked_model(pretrained())
        masked.recalibrate(wrap(x) for x in batches())
        results.append(statistics(masked))
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


def test_recalibrate_twice_is_recalibrate_once() -> None:
    masked = get_masked_model(pretrained())
    masked.recalibrate(batches())
    first = {name: value.clone() for name, value in exact(masked).items()}
    masked.recalibrate(batches())
    assert_statistics_close(exact(masked), first)


def test_recalibrate_switches_dropout_off() -> None:
    """Only norm layers run in train mode: the statistics are those of the network as it will be used."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Dropout(0.9), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    masked = get_masked_model(base).train()
    masked.recalibrate(batches())
    expected = torch.stack([base[1](x).mean((0, 2, 3)) for x in batches()]).mean(0)
    torch.testing.assert_close(exact(masked)["2.running_mean"], expected.detach(), rtol=1e-4, atol=1e-5)
    assert base[0].training


def test_recalibrate_that_fails_changes_nothing() -> None:
    def broken() -> object:
        yield batches(1)[0]
        raise OSError("the disk is gone")

    masked = get_masked_model(pretrained()).train()
    before = statistics(masked)
    with pytest.raises(OSError, match="disk"):
        masked.recalibrate(broken())
    with pytest.raises(ConfigError, match="at least one batch"):
        masked.recalibrate([])
    assert all(torch.equal(value, before[name]) for name, value in statistics(masked).items())
    assert masked.training
    assert [layer.momentum for layer in masked.base.modules() if isinstance(layer, nn.BatchNorm2d)] == [0.1, 0.1]


def test_recalibrate_needs_a_mask() -> None:
    masked = get_masked_model(pretrained())
    with masked.disable_mask(), pytest.raises(SelfmaskError, match="no mask"):
        masked.recalibrate(batches())


def test_recalibrate_leaves_frozen_batch_norms_alone() -> None:
    """torchvision's detection backbones have batch norms that are constants: nothing to estimate, nothing to break."""
    ops = pytest.importorskip("torchvision.ops")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(1, 4, 3), ops.FrozenBatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    base[1].running_mean.fill_(0.5)
    masked = get_masked_model(base)
    masked.recalibrate(batches())
    found = exact(masked)
    assert torch.equal(found["1.running_mean"], torch.full((4,), 0.5))
    dense = masked.merge_and_unload()
    update_bn(batches(), dense)
    torch.testing.assert_close(found["3.running_mean"], dense[3].running_mean, rtol=1e-4, atol=1e-5)


def test_recalibrate_instance_norm() -> None:
    """Instance norm keeps statistics too, but knows no plain average: they must not be lost."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
    masked = get_masked_model(base)
    masked.recalibrate(batches())
    expected = torch.stack([base[0](x).mean((0, 2, 3)) for x in batches()]).mean(0)
    torch.testing.assert_close(exact(masked)["1.running_mean"], expected.detach(), rtol=1e-4, atol=1e-5)
