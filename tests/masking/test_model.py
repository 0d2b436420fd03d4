"""A masked model is an ordinary module: modes, types, copies, processes, compilers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import WrongBaseError

from ..processes import PROCESSES
from .architectures import (
    assert_gradients_close,
    assert_same_state,
    base_of,
    digits_base,
    inputs_of,
    loss_of,
    named_scores,
    perturb_scores,
    score_gradients,
    state_of,
)
from .digits import bits_of, expected_gradients, images, masked_digits, saved, sgd

# ---- modes and types --------------------------------------------------------------------------------------------


def test_train_and_eval() -> None:
    masked = masked_digits()
    x = images()
    assert masked.eval() is masked
    assert not masked.base.training
    torch.testing.assert_close(masked(x)[:1], masked(x[:1]))  # each image by itself
    assert masked.train() is masked
    assert masked.base.training
    assert not torch.allclose(masked(x)[:1], masked(images()[:4])[:1])  # batch statistics


def test_only_scores_can_be_trained() -> None:
    masked = masked_digits()
    trainable = {id(p) for p in masked.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in masked.scores.parameters()}
    assert all(p.dtype == torch.float32 for p in masked.scores.parameters())


@pytest.mark.parametrize("mode", [True, False])
def test_takes_the_mode_of_the_base(mode: bool) -> None:
    assert get_masked_model(digits_base().train(mode)).training == mode


def test_float64() -> None:
    masked = masked_digits().eval()
    optimizer = sgd(masked)
    x = images()
    expected, bits = masked(x).detach(), bits_of(masked)
    masked.to(torch.float64)
    assert all(score.dtype == torch.float32 for score in masked.scores.parameters())
    output = masked(x.double())
    assert output.dtype == torch.float64
    torch.testing.assert_close(output.float(), expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(bits_of(masked), bits)
    loss_of(output).backward()
    optimizer.step()  # the parameters it was given are still ours
    assert not torch.equal(masked(x.double()), output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_survive_a_conversion(dtype: torch.dtype) -> None:
    masked = masked_digits()
    loss_of(masked(images())).backward()
    before = score_gradients(masked)
    scores = {name: score.detach().clone() for name, score in named_scores(masked).items()}
    masked.to(dtype)
    for name, score in named_scores(masked).items():
        assert torch.equal(score, scores[name])  # not even rounded
        assert score.grad.dtype == torch.float32
        torch.testing.assert_close(score.grad, before[name], rtol=1e-2, atol=1e-3)


def test_bfloat16_trains() -> None:
    """Steps far smaller than bfloat16 can see near 1 must add up in the scores."""
    masked = masked_digits().to(torch.bfloat16).train()
    assert masked.base[0].weight.dtype == torch.bfloat16
    assert all(score.dtype == torch.float32 for score in masked.scores.parameters())
    before = {name: score.detach().clone() for name, score in named_scores(masked).items()}
    optimizer = sgd(masked, lr=1e-5)
    output = masked(images().bfloat16())
    assert output.dtype == torch.bfloat16
    loss_of(output.float()).backward()
    optimizer.step()
    moved = torch.cat([(score - before[name]).flatten().abs() for name, score in named_scores(masked).items()])
    assert 0 < moved.max() < 1e-3


def large_weights_off(seed: int = 0) -> tuple[nn.Module, MaskedModel]:
    """A base, and a mask as training makes them: mostly large weights are off, so the file codes bits given |w|."""
    torch.manual_seed(seed)
    base = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128))
    masked = get_masked_model(copy.deepcopy(base))
    with torch.no_grad():
        for name, score in named_scores(masked).items():
            weight = masked.base.get_parameter(name).abs()
            score[(weight > weight.flatten().quantile(0.9)) & (torch.rand(weight.shape) < 0.5)] = -1
    return base, masked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_saving_after_a_conversion_loads_on_the_original_base(dtype: torch.dtype, tmp_path: Path) -> None:
    base, masked = large_weights_off()
    bits = bits_of(masked)
    masked.to(dtype).save_pretrained(tmp_path / "mask.smn")
    assert np.array_equal(bits_of(MaskedModel.from_pretrained(base, tmp_path / "mask.smn")), bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loaded_masks_are_converted_along(dtype: torch.dtype, tmp_path: Path) -> None:
    """Masks come first, then the conversion: a converted base is no longer the one that files speak of."""
    base, masked = large_weights_off()
    masked.save_pretrained(tmp_path / "mask.smn")
    converted = get_masked_model(base)
    converted.load_mask(tmp_path / "mask.smn", "early")
    converted.to(dtype)
    with pytest.raises(WrongBaseError, match="converted"):
        converted.load_mask(tmp_path / "mask.smn", "late")
    assert converted.mask_names == ["default", "early"]
    converted.set_mask("early")
    assert np.array_equal(bits_of(converted), bits_of(masked))
    x = torch.randn(4, 256)
    output = converted(x.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), masked(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_conversion_keeps_the_choice_of_large_weights(dtype: torch.dtype, loaded: bool, tmp_path: Path) -> None:
    """Which weights are largest is decided on the original ones; rounding makes others equal."""
    torch.manual_seed(0)
    base = nn.Linear(64, 64, bias=False)
    masked = get_masked_model(copy.deepcopy(base), MaskConfig(fraction=0.3, fraction_by="magnitude", s0=-1.0))
    if loaded:
        masked.save_pretrained(tmp_path / "mask.smn")
        masked = MaskedModel.from_pretrained(copy.deepcopy(base), tmp_path / "mask.smn")
    off = masked.merge_and_unload().weight == 0
    assert torch.equal(masked.to(dtype).merge_and_unload().weight == 0, off)
    masked.save_pretrained(tmp_path / "again.smn")
    again = MaskedModel.from_pretrained(base, tmp_path / "again.smn")
    assert torch.equal(again.merge_and_unload().weight == 0, off)


def test_channels_last(tmp_path: Path) -> None:
    x = inputs_of("resnet18")
    plain = get_masked_model(base_of("resnet18")).eval()
    perturb_scores(plain)
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    x_last = x.to(memory_format=torch.channels_last)
    assert other.base.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(other(x_last), plain(x), rtol=1e-3, atol=1e-4)
    loss_of(plain(x)).backward()
    loss_of(other(x_last)).backward()
    assert_gradients_close(score_gradients(other), score_gradients(plain), 1e-3)
    assert np.array_equal(bits_of(other), bits_of(plain))
    other.save_pretrained(tmp_path / "last.smn")
    loaded = MaskedModel.from_pretrained(base_of("resnet18"), tmp_path / "last.smn").eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), plain(x))
        loaded.to(memory_format=torch.channels_last)
        torch.testing.assert_close(loaded(x_last), plain(x), rtol=1e-3, atol=1e-4)


def test_autocast() -> None:
    masked = masked_digits().eval()
    x = images()
    with torch.autocast("cpu", torch.bfloat16):
        output = masked(x)
        loss = loss_of(output.float())
    assert output.dtype == torch.bfloat16
    loss.backward()
    expected = expected_gradients(masked, x)
    found = score_gradients(masked)
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert_gradients_close(found, expected, 0.1)


# ---- compilers, copies and processes ----------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str) -> None:
    """Three steps, so that effective weights are computed anew and statistics move inside compiled code."""
    torch._dynamo.reset()
    plain, masked = masked_digits().train(), masked_digits().train()
    compiled = torch.compile(masked, backend=backend)
    optimizers = [sgd(plain), sgd(masked)]
    for step in range(3):
        outputs = []
        for model, optimizer in zip((plain, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(model(images(step)))
            loss_of(outputs[-1]).backward()
        torch.testing.assert_close(*outputs)
        assert_gradients_close(score_gradients(masked), score_gradients(plain), 1e-4)
        for optimizer in optimizers:
            optimizer.step()
    plain.eval(), masked.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), plain(images()), rtol=1e-4, atol=1e-5)
        with masked.disable_mask():
            assert torch.equal(compiled(images()), digits_base().eval()(images()))
    torch._dynamo.reset()


def test_deepcopy_is_independent() -> None:
    masked = masked_digits().train()
    loss_of(masked(images()))  # a graph is alive, which cannot be copied
    twin = copy.deepcopy(masked)
    twin.eval(), masked.eval()
    before = masked(images()).detach()
    assert torch.equal(twin(images()), before)
    optimizer = sgd(twin)
    loss_of(twin.train()(images(1))).backward()
    optimizer.step()
    assert not torch.equal(twin.eval()(images()), before)
    assert torch.equal(masked(images()), before)
    assert all(score.grad is None for score in masked.scores.parameters())


@pytest.mark.parametrize("loaded", [True, False])
def test_pickle(loaded: bool, tmp_path: Path) -> None:
    masked = masked_digits(fraction=0.5)
    if loaded:
        masked = MaskedModel.from_pretrained(digits_base(), saved(tmp_path / "mask.smn", 1))
    masked.eval()
    expected = masked(images())
    twin = pickle.loads(pickle.dumps(masked))
    assert torch.equal(twin(images()), expected)
    assert twin.config == masked.config
    buffer = io.BytesIO()
    torch.save(masked, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(images()), expected)


def forward_elsewhere(masked: MaskedModel, x: Tensor) -> np.ndarray:
    return masked(x).detach().numpy()


@pytest.mark.heavy
def test_another_process() -> None:
    """Nothing may depend on state of the parent that another process has not."""
    masked = masked_digits().eval()
    masked(images())
    with PROCESSES.Pool(1) as pool:
        found = pool.apply(forward_elsewhere, (masked, images()))
    np.testing.assert_allclose(found, masked(images()).detach(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_distributed_data_parallel() -> None:
    plain, masked = masked_digits().train(), masked_digits().train()
    parallel = nn.parallel.DistributedDataParallel(masked)
    base_before = state_of(masked.base)
    optimizers = [sgd(plain), sgd(masked)]
    for step in range(3):
        for model, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(images(step)) + model(images(step + 9))).backward()
            optimizer.step()
        for name, gradient in score_gradients(plain).items():
            torch.testing.assert_close(score_gradients(masked)[name], gradient, msg=name)
    assert np.array_equal(bits_of(masked), bits_of(plain))
    assert_same_state(masked.base, base_before)


def test_state_dict_round_trip() -> None:
    """Checkpoints of a training run are ordinary ones."""
    masked = masked_digits().train()
    masked(images())
    state = copy.deepcopy(masked.state_dict())
    other = get_masked_model(digits_base())
    other(images(4))
    other.load_state_dict(state)
    assert torch.equal(other.eval()(images()), masked.eval()(images()))
