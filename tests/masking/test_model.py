"""A masked model is an ordinary module: modes, types, copies, processes, compilers, optimizers, several masks."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import selfmask.masking.model
from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import ConfigError, NotAMaskFileError, SelfmaskError, UnknownMaskError, WrongBaseError

from ..processes import PROCESSES
from .architectures import (
    assert_gradients_close,
    assert_same_state,
    base_of,
    digits_base,
    inputs_of,
    loss_of,
    naive_mask,
    named_scores,
    oracle,
    perturb_scores,
    score_gradients,
    state_of,
)


def images(seed: int = 0, n: int = 8) -> Tensor:
    return torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def masked_digits(seed: int = 3, **settings: object) -> MaskedModel:
    masked = get_masked_model(digits_base(), MaskConfig(**settings))
    perturb_scores(masked, seed=seed)
    return masked


def saved(path: Path, seed: int, **settings: object) -> Path:
    """A file of a mask of its own, with statistics of its own."""
    masked = masked_digits(seed, **settings)
    masked.train()(images(seed))
    masked.save_pretrained(path)
    return path


def bits_of(masked: MaskedModel) -> np.ndarray:
    return np.concatenate([packed for _, packed in sorted(masked.pack().bits.items())])


def sgd(masked: MaskedModel, lr: float = 5.0, **settings: object) -> torch.optim.SGD:
    return torch.optim.SGD(masked.scores.parameters(), lr=lr, momentum=0.9, **settings)


def expected_gradients(masked: MaskedModel, *xs: Tensor) -> dict[str, Tensor]:
    """The sum over several inputs, each by the oracle on a base with the mask's statistics."""
    base = copy.deepcopy(masked.base)
    parts = [oracle(masked, base, x)[1] for x in xs]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


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


# ---- effective weights: once per step, never stale --------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each tensor whose mask is computed; four of them make a computation of digits_base."""
    calls: list[int] = []
    original = selfmask.masking.model.write_mask

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(selfmask.masking.model, "write_mask", counting)
    return calls


def computations(masked: MaskedModel, calls: list[int]) -> float:
    result = len(calls) / len(list(masked.scores.parameters()))
    calls.clear()
    return result


def test_computed_once_per_step(computed: list[int]) -> None:
    """Multi-crop runs the backbone several times; the masks are the same for all."""
    masked = masked_digits().train()
    optimizer = sgd(masked)
    computed.clear()
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(loss_of(masked(images(step * 10 + crop, n=8 - crop))) for crop in range(4))
        loss.backward()
        optimizer.step()
        assert computations(masked, computed) == 1


def test_computed_once_for_an_evaluation(computed: list[int]) -> None:
    masked = masked_digits().eval()
    computed.clear()
    with torch.no_grad():
        for seed in range(5):
            masked(images(seed))
    assert computations(masked, computed) <= 1
    with torch.inference_mode():
        for seed in range(5):
            masked(images(seed))
    assert computations(masked, computed) <= 1


def test_computed_again_after_a_step() -> None:
    masked = masked_digits().eval()
    optimizer = sgd(masked)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        output = masked(images())
        seen.append(output.detach())
        loss_of(output).backward()
        optimizer.step()
        torch.testing.assert_close(masked(images()).detach(), masked.merge_and_unload()(images()).detach())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_every_kind_of_sgd(settings: dict[str, bool]) -> None:
    """Fused and foreach steps write to the scores by other roads; each must be noticed."""
    masked = masked_digits().train()
    optimizer = sgd(masked, lr=3.0, **settings)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(masked(images(step))).backward()
        optimizer.step()
        output = masked(images(step))
        torch.testing.assert_close(output, masked.merge_and_unload().train()(images(step)))
        assert_gradients_close(expected_of(masked, images(step)), expected_gradients(masked, images(step)), 1e-3)


def expected_of(masked: MaskedModel, x: Tensor) -> dict[str, Tensor]:
    """Gradients of one fresh forward and backward."""
    for score in masked.scores.parameters():
        score.grad = None
    loss_of(masked(x)).backward()
    return score_gradients(masked)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_other_optimizers(optimizer: type[torch.optim.Optimizer]) -> None:
    masked = masked_digits().eval()
    step = optimizer(masked.scores.parameters(), lr=0.5)
    before = masked(images())
    loss_of(before).backward()
    step.step()
    assert not torch.equal(masked(images()), before)
    torch.testing.assert_close(masked(images()), masked.merge_and_unload()(images()))


def _in_place(masked: MaskedModel, values: list[Tensor]) -> None:
    with torch.no_grad():
        for score, value in zip(masked.scores.parameters(), values, strict=True):
            score.copy_(value)


def _load_state_dict(masked: MaskedModel, values: list[Tensor]) -> None:
    state = {name: value.clone() for name, value in zip(masked.scores.state_dict(), values, strict=True)}
    masked.scores.load_state_dict(state)


def _load_state_dict_assign(masked: MaskedModel, values: list[Tensor]) -> None:
    state = {name: value.clone() for name, value in zip(masked.scores.state_dict(), values, strict=True)}
    masked.scores.load_state_dict(state, assign=True)


def _vector_to_parameters(masked: MaskedModel, values: list[Tensor]) -> None:
    nn.utils.vector_to_parameters(torch.cat([value.flatten() for value in values]), masked.scores.parameters())


@pytest.mark.parametrize("change", [_in_place, _load_state_dict, _load_state_dict_assign, _vector_to_parameters])
@pytest.mark.parametrize("grad", [True, False])
def test_scores_changed_by_hand(change: object, grad: bool) -> None:
    """Averaged scores, restored checkpoints: the next call uses the new scores."""
    masked = masked_digits(seed=3).eval()
    wanted = masked_digits(seed=4).eval()
    with torch.set_grad_enabled(grad):
        masked(images())
        change(masked, [score.detach().clone() for score in wanted.scores.parameters()])
        assert torch.equal(masked(images()), wanted(images()))


def test_optimizers_that_write_to_data() -> None:
    """Old ones do, where autograd cannot see it; in the usual order of a step it must not matter."""
    masked = masked_digits().eval()
    for seed in range(3):
        with torch.no_grad():
            masked(images(7))
        loss_of(masked(images(seed))).backward()
        for score in masked.scores.parameters():
            score.data.add_(score.grad, alpha=-5.0)
            score.grad = None
        expected = dense_of(masked)(images(seed))
        with torch.no_grad():
            torch.testing.assert_close(masked(images(seed)), expected)
        torch.testing.assert_close(masked(images(seed)).detach(), expected)


def dense_of(masked: MaskedModel) -> nn.Module:
    """The base with the mask burnt in by hand."""
    dense = copy.deepcopy(masked.base).requires_grad_(False)
    for name, score in named_scores(masked).items():
        mask = naive_mask(masked, score).float()
        dense.get_parameter(name).mul_(mask / mask.mean().sqrt())
    return dense


def test_base_weights_changed_by_hand() -> None:
    masked = masked_digits().eval()
    before = masked(images()).detach()
    with torch.no_grad():
        masked.base[0].weight.mul_(3)
    found = masked(images()).detach()
    assert not torch.equal(found, before)
    assert torch.equal(found, masked.merge_and_unload()(images()).detach())


def test_progress_is_noticed() -> None:
    masked = masked_digits(rule="progressive_topk", active_share=0.2).eval()
    with torch.no_grad():
        before = masked(images())
        masked.progress = 1.0
        assert not torch.equal(masked(images()), before)


# ---- gradients in every order of calls --------------------------------------------------------------------------


@pytest.fixture
def masked() -> MaskedModel:
    """In eval mode, where every call is the same function of its input."""
    masked = masked_digits().eval()
    masked.base[1].running_mean.normal_()
    return get_perturbed(masked.base)


def get_perturbed(base: nn.Module) -> MaskedModel:
    masked = get_masked_model(base)
    perturb_scores(masked)
    return masked.eval()


def test_two_forwards_one_backward(masked: MaskedModel) -> None:
    (loss_of(masked(images(1))) + loss_of(masked(images(2)))).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1), images(2)), 1e-3)


def test_two_forwards_two_backwards(masked: MaskedModel) -> None:
    """One loss per view, each with its own backward, in either order."""
    expected = expected_gradients(masked, images(1), images(2))
    for first, second in ((0, 1), (1, 0)):
        masked.scores.zero_grad()
        losses = [loss_of(masked(images(1))), loss_of(masked(images(2)))]
        losses[first].backward()
        losses[second].backward()
        assert_gradients_close(score_gradients(masked), expected, 1e-3)


def test_a_late_backward_is_right_or_refused() -> None:
    """The memory of effective weights is used again; a backward that comes too late must not read what is new."""
    torch.manual_seed(0)
    masked = get_masked_model(nn.Linear(4, 4))
    perturb_scores(masked)
    xs = [torch.randn(3, 4) for _ in range(3)]
    _, expected = oracle(masked, masked.base, xs[1])
    losses = [loss_of(masked(x)) for x in xs[:2]]
    losses[0].backward()
    masked.scores.zero_grad()
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.neg_()
    masked(xs[2])
    try:
        losses[1].backward()
    except RuntimeError:  # as PyTorch does where weights were changed before their backward
        return
    assert_gradients_close(score_gradients(masked), expected, 1e-3)


def test_gradient_accumulation(masked: MaskedModel) -> None:
    for seed in (1, 2, 3):
        loss_of(masked(images(seed))).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, *map(images, (1, 2, 3))), 1e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_in_between(mode: type, masked: MaskedModel) -> None:
    expected = expected_gradients(masked, images(1), images(2))
    with mode():
        masked(images(7))
    loss = loss_of(masked(images(1)))
    with mode():
        silent = masked(images(1))
    assert not silent.requires_grad
    loss = loss + loss_of(masked(images(2)))
    with mode():
        masked(images(7))
    loss.backward()
    assert_gradients_close(score_gradients(masked), expected, 1e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_training_steps(mode: type) -> None:
    """The masks of a run that looks at itself on the way are those of one that does not."""
    quiet, watched = masked_digits(), masked_digits()
    for masked in (quiet, watched):
        optimizer = sgd(masked)
        for step in range(3):
            masked.train()
            optimizer.zero_grad()
            loss_of(masked(images(step))).backward()
            optimizer.step()
            if masked is watched:
                masked.eval()
                with mode():
                    output = masked(images(5))
                    assert torch.equal(output, masked.merge_and_unload()(images(5)))
    assert torch.equal(quiet.eval()(images()), watched.eval()(images()))


def test_switching_masks_between_forward_and_backward(masked: MaskedModel) -> None:
    expected = expected_gradients(masked, images(1))
    other = get_masked_model(copy.deepcopy(masked.base))
    perturb_scores(other, seed=8)
    masked.load_mask(other.mask_bytes(), "other")
    loss = loss_of(masked(images(1)))
    masked.set_mask("other")
    with torch.no_grad():
        masked(images(2))
    masked(images(2))
    masked.set_mask("default")
    with torch.no_grad():
        masked(images(3))
    loss.backward()
    assert_gradients_close(score_gradients(masked), expected, 1e-3)


def test_a_step_between_forward_and_backward(masked: MaskedModel) -> None:
    """The gradient is that of the masks that ran, as it is for any other network's weights, or an error."""
    expected = expected_gradients(masked, images(1))
    loss = loss_of(masked(images(1)))
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.neg_()
    masked(images(2))
    loss.backward()
    assert_gradients_close(score_gradients(masked), expected, 1e-3)


def test_a_discarded_forward(masked: MaskedModel) -> None:
    masked(images(5))
    loss_of(masked(images(1))).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1)), 1e-3)


def test_retained_graph(masked: MaskedModel) -> None:
    loss = loss_of(masked(images(1)))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1), images(1)), 1e-3)


def test_gradient_of_the_input(masked: MaskedModel) -> None:
    """Saliency maps, and adversarial training."""
    x = images(1).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(masked(x)), x)
    merged = masked.merge_and_unload()
    (expected,) = torch.autograd.grad(loss_of(merged(x)), x)
    torch.testing.assert_close(gradient, expected)
    loss_of(masked(x)).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1)), 1e-3)


def test_some_scores_frozen(masked: MaskedModel) -> None:
    scores = named_scores(masked)
    scores["0.weight"].requires_grad_(False)
    loss_of(masked(images(1))).backward()
    assert scores["0.weight"].grad is None
    expected = expected_gradients(masked, images(1))
    for name, score in scores.items():
        if name != "0.weight":
            torch.testing.assert_close(score.grad, expected[name], rtol=1e-3, atol=1e-4)


def test_memory_is_let_go() -> None:
    """A model that goes out of use, its last graph never used up, frees its memory at once: no reference cycles."""
    masked = masked_digits()
    loss_of(masked(images()))
    gone = [weakref.ref(tensor) for tensor in (*masked.base.parameters(), *masked.scores.parameters())]
    gc.disable()
    try:
        del masked
        assert all(reference() is None for reference in gone)
    finally:
        gc.enable()


def test_memory_is_used_again(masked: MaskedModel) -> None:
    """Training takes one effective weight per tensor, not one per step."""
    optimizer = sgd(masked)
    places = set()
    for step in range(6):
        optimizer.zero_grad()
        seen = []
        hook = masked.base[3].register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.weight))
        loss = loss_of(masked(images(step)))
        hook.remove()
        places.add(seen[0].data_ptr())
        loss.backward()
        optimizer.step()
    assert len(places) == 1


# ---- the base alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["trainable", "loaded", "loaded-trainable"])
def test_disable_mask(training: bool, kind: str, tmp_path: Path) -> None:
    """The untouched base, its own statistics included, in either mode; and nothing changes on the way."""
    path = saved(tmp_path / "mask.smn", 1)
    base = digits_base()
    if kind == "trainable":
        masked = get_masked_model(base)
        perturb_scores(masked)
        masked.train()(images(2))
    else:
        masked = MaskedModel.from_pretrained(base, path, is_trainable=kind == "loaded-trainable")
    masked.train(training)
    before, mask_before = state_of(base), state_of(masked.merge_and_unload())
    with masked.disable_mask():
        assert masked.active_mask is None
        assert torch.equal(masked(images()), digits_base().train(training)(images()))
        assert not masked(images()).requires_grad
    assert masked.active_mask == "default"
    assert_same_state(base, before)
    assert_same_state(masked.merge_and_unload(), mask_before)
    assert not torch.equal(masked(images()), digits_base().train(training)(images()))


def test_disable_mask_ends_with_an_exception() -> None:
    masked = masked_digits()
    with pytest.raises(ZeroDivisionError), masked.disable_mask():
        raise ZeroDivisionError
    assert masked.active_mask == "default"


def test_disable_mask_can_be_nested() -> None:
    masked = masked_digits().eval()
    with masked.disable_mask():
        with masked.disable_mask():
            pass
        assert torch.equal(masked(images()), digits_base().eval()(images()))
    assert masked.active_mask == "default"


def test_disable_mask_keeps_the_gradients_of_the_mask(masked: MaskedModel) -> None:
    """Distillation: the base teaches, between forward and backward of the masked student."""
    output = masked(images(1))
    with masked.disable_mask():
        masked(images(1))
    loss_of(output).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1)), 1e-3)


def test_nothing_to_save_while_disabled(tmp_path: Path) -> None:
    masked = masked_digits()
    with masked.disable_mask(), pytest.raises(SelfmaskError, match="no mask is active"):
        masked.save_pretrained(tmp_path / "mask.smn")
    assert not list(tmp_path.iterdir())


# ---- several masks ----------------------------------------------------------------------------------------------


def test_several_masks_on_one_base(tmp_path: Path) -> None:
    cats, dogs = saved(tmp_path / "cats.smn", 1), saved(tmp_path / "dogs.smn", 2, select=["3.weight"])
    masked = masked_digits().eval()
    masked.load_mask(cats, "cats")
    masked.load_mask(dogs, name="dogs")
    assert masked.mask_names == ["default", "cats", "dogs"]
    assert masked.active_mask == "default"
    alone = {
        "cats": MaskedModel.from_pretrained(digits_base(), cats).eval()(images()),
        "dogs": MaskedModel.from_pretrained(digits_base(), dogs).eval()(images()),
        "default": masked_digits().eval()(images()),
    }
    for name in ("cats", "dogs", "default", "dogs", "cats", "default"):
        masked.set_mask(name)
        assert masked.active_mask == name
        assert torch.equal(masked(images()), alone[name])
        assert torch.equal(masked.merge_and_unload()(images()), alone[name])
    masked.set_mask("dogs")
    assert masked.num_masked == 16 * 8 * 9
    assert set(masked.sparsity()) == {"3.weight", "total"}


def test_delete_mask(tmp_path: Path) -> None:
    masked = masked_digits()
    masked.load_mask(saved(tmp_path / "cats.smn", 1), "cats")
    masked.set_mask("cats")
    with pytest.raises(UnknownMaskError, match="active"):
        masked.delete_mask("cats")
    masked.set_mask("default")
    masked.delete_mask("cats")
    assert masked.mask_names == ["default"]
    with pytest.raises(UnknownMaskError):
        masked.delete_mask("cats")


def test_a_name_used_again(tmp_path: Path) -> None:
    """Another mask under an old name is another mask."""
    masked = masked_digits().eval()
    for seed in (1, 2):
        path = saved(tmp_path / f"{seed}.smn", seed)
        masked.load_mask(path, "tenant")
        masked.set_mask("tenant")
        expected = MaskedModel.from_pretrained(digits_base(), path).eval()(images())
        assert torch.equal(masked(images()), expected)
        masked.set_mask("default")
        masked.delete_mask("tenant")


def test_the_mask_that_disable_mask_will_return_to_cannot_be_deleted(tmp_path: Path) -> None:
    masked = masked_digits().eval()
    masked.load_mask(saved(tmp_path / "cats.smn", 1), "cats")
    masked.set_mask("cats")
    expected = masked(images())
    with masked.disable_mask(), pytest.raises(UnknownMaskError):
        masked.delete_mask("cats")
    assert torch.equal(masked(images()), expected)


def test_unknown_masks(tmp_path: Path) -> None:
    masked = masked_digits().eval()
    expected = masked(images())
    with pytest.raises(UnknownMaskError, match="'birds'") as caught:
        masked.set_mask("birds")
    assert isinstance(caught.value, KeyError)
    assert "default" in str(caught.value)
    assert "\n" in str(caught.value)  # readable, not the repr that KeyError shows
    with pytest.raises(NotAMaskFileError):
        masked.load_mask(tmp_path / "birds.smn", "birds")
    assert masked.mask_names == ["default"]
    assert torch.equal(masked(images()), expected)


def test_names_are_not_taken_twice(tmp_path: Path) -> None:
    path = saved(tmp_path / "cats.smn", 1)
    masked = masked_digits()
    masked.load_mask(path, "cats")
    for name in ("cats", "default"):
        with pytest.raises(ConfigError, match="already"):
            masked.load_mask(path, name)


def test_a_failed_load_leaves_the_model_alone(tmp_path: Path) -> None:
    """The user goes on with the model, and must not find it frozen."""
    model = digits_base().eval()
    with pytest.raises(NotAMaskFileError):
        MaskedModel.from_pretrained(model, tmp_path / "missing.smn")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_loaded_masks_stay_packed(tmp_path: Path) -> None:
    """Thousands of masks on one base: each costs a bit a weight, and its statistics."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512))
    masked = get_masked_model(base)
    perturb_scores(masked, spread=3)
    masked.save_pretrained(tmp_path / "mask.smn")
    loaded = MaskedModel.from_pretrained(base, tmp_path / "mask.smn").eval()
    loaded(torch.randn(2, 512))
    one = pickled_size(loaded)
    for number in range(8):
        loaded.load_mask(tmp_path / "mask.smn", str(number))
        loaded.set_mask(str(number))
        loaded(torch.randn(2, 512))
    each = (pickled_size(loaded) - one) / 8
    bits, floats = 512 * 512 / 8, 4 * 2 * 512
    assert bits < each < 1.1 * (bits + floats) + 2000


def pickled_size(masked: MaskedModel) -> int:
    """All that a model holds on to."""
    return len(pickle.dumps(masked))


def test_only_the_active_mask_is_expanded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = nn.Linear(301, 307, bias=False)  # a size that nothing else in this process has
    get_masked_model(base).save_pretrained(tmp_path / "mask.smn")
    masked = MaskedModel.from_pretrained(base, tmp_path / "mask.smn").eval()
    for number in range(5):
        masked.load_mask(tmp_path / "mask.smn", str(number))
        masked.set_mask(str(number))
        with torch.no_grad():
            masked(torch.randn(2, 301))
    gc.collect()
    storages = {
        item.untyped_storage().data_ptr()
        for item in gc.get_objects()
        if type(item) in (Tensor, nn.Parameter) and item.numel() == 301 * 307
    }
    assert len(storages) == 2  # the base, and one effective weight


# ---- files and merging ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mu": 0.5, "s0": 0.75},
        {"rule": "topk", "active_share": 0.3},
        {"rule": "progressive_topk", "active_share": 0.2},
        {"mu": 1.0, "s0": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_training_goes_on_from_a_file(settings: dict[str, object], progress: float, tmp_path: Path) -> None:
    """With is_trainable a loaded mask is the mask that was saved, with scores that can be trained."""
    masked = masked_digits(**settings).eval()
    masked.progress = progress
    masked.save_pretrained(tmp_path / "mask.smn")
    again = MaskedModel.from_pretrained(digits_base(), tmp_path / "mask.smn", is_trainable=True).eval()
    assert again.config == masked.config
    assert np.array_equal(bits_of(again), bits_of(masked))
    output = again(images())
    assert torch.equal(output, masked(images()))
    before = [score.detach().clone() for score in again.scores.values()]
    loss_of(output).backward()
    sgd(again, lr=100).step()
    assert not all(torch.equal(*pair) for pair in zip(again.scores.values(), before, strict=True))


def test_order_of_the_scores_is_that_of_the_model(tmp_path: Path) -> None:
    """Optimizers keep their state by position: a reloaded mask must list its scores as the first run did."""
    base = nn.Sequential(*(nn.Linear(40, 40) for _ in range(12)))
    masked = get_masked_model(base)
    perturb_scores(masked)
    with torch.no_grad():
        named_scores(masked)["3.weight"].fill_(1)  # this one is coded in another way than the rest
    masked.save_pretrained(tmp_path / "mask.smn")
    again = MaskedModel.from_pretrained(base, tmp_path / "mask.smn", is_trainable=True)
    assert list(again.scores) == list(masked.scores)
    loaded = MaskedModel.from_pretrained(base, tmp_path / "mask.smn")
    assert list(loaded.sparsity()) == list(masked.sparsity())


def test_loaded_masks_have_no_gradients(tmp_path: Path) -> None:
    masked = MaskedModel.from_pretrained(digits_base(), saved(tmp_path / "mask.smn", 1))
    assert not any(parameter.requires_grad for parameter in masked.parameters())
    assert not masked(images()).requires_grad


def test_the_config_comes_with_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "mask.smn", 1, rule="topk", active_share=0.4, select=["0.*", "3.*"], norm="frozen")
    masked = MaskedModel.from_pretrained(digits_base(), path)
    assert masked.config == MaskConfig(rule="topk", active_share=0.4, select=["0.*", "3.*"], norm="frozen")


def test_merge_leaves_no_trace() -> None:
    base = digits_base()
    base[3].requires_grad_(False)
    flags = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    masked = get_masked_model(base)
    perturb_scores(masked)
    masked.train()(images())
    merged = masked.merge_and_unload()
    assert type(merged) is type(base)
    assert {name: parameter.requires_grad for name, parameter in merged.named_parameters()} == flags
    assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in merged.parameters())
    assert merged.state_dict().keys() == base.state_dict().keys()
    for module in merged.modules():
        assert not type(module).__module__.startswith("selfmask")
        assert not any(getattr(module, hooks) for hooks in vars(module) if hooks.endswith("_hooks"))
    assert b"selfmask" not in pickle.dumps(merged)
    # nor does it share memory with anything of ours
    expected = masked.eval()(images()).detach()
    with torch.no_grad():
        for value in merged.state_dict().values():
            value.zero_()
    assert torch.equal(masked(images()), expected)


@pytest.mark.parametrize("training", [True, False])
def test_merged_keeps_the_mode(training: bool) -> None:
    assert masked_digits().train(training).merge_and_unload().training == training


def test_merging_while_disabled_gives_the_base() -> None:
    masked = masked_digits().eval()
    with masked.disable_mask():
        assert_same_state(masked.merge_and_unload(), state_of(digits_base()))


def test_keyword_arguments_and_outputs_pass_through() -> None:
    masked = get_masked_model(base_of("transformers_clip")).eval()
    plain = base_of("transformers_clip").eval()
    x = inputs_of("transformers_clip")
    found = masked(pixel_values=x, output_hidden_states=True)
    expected = plain(pixel_values=x, output_hidden_states=True)
    assert type(found) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(found.hidden_states, expected.hidden_states, strict=True))


def test_sparsity_is_the_active_share() -> None:
    masked = masked_digits()
    shares = masked.sparsity()
    merged = masked.merge_and_unload()
    on = total = 0
    for name in named_scores(masked):
        mask = merged.get_parameter(name) != 0
        assert shares[name] == pytest.approx(mask.float().mean().item())
        on, total = on + int(mask.sum()), total + mask.numel()
    assert shares["total"] == pytest.approx(on / total)
    assert masked.num_masked == total


def test_config_cannot_be_changed_behind_our_back() -> None:
    masked = masked_digits()
    with pytest.raises(dataclasses.FrozenInstanceError):
        masked.config.mu = 3.0
