"""A masked model through torch.export and torch.onnx: the program gives what the model gives."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import ExportError
from selfmask.masking.tracing import Originals

from ..light import mostly_heavy
from .architectures import digits_base, loss_of, perturb_scores
from .digits import images as digits
from .digits import masked_digits, saved, sgd
from .test_methods import NETWORKS, clothes, masked_timm

pytestmark = pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # of functional_call
BATCH = {0: torch.export.Dim("batch", min=1)}


def any_batch(model: nn.Module) -> Any:
    """As shapes are told of a module whose forward takes whatever its base takes."""
    return {"args": (BATCH,)} if isinstance(model, MaskedModel) else (BATCH,)


def program_of(model: nn.Module, x: Tensor, **settings: Any) -> torch.export.ExportedProgram:
    return torch.export.export(model, (x[:2],), dynamic_shapes=any_batch(model), **settings)


def onnx_of(model: nn.Module, x: Tensor) -> bytes:
    made: Any = torch.onnx.export(model, (x[:2],), dynamic_shapes=any_batch(model), dynamo=True, verbose=False)
    data: bytes = made.model_proto.SerializeToString()
    return data


def size_of(program: torch.export.ExportedProgram) -> int:
    file = io.BytesIO()
    torch.export.save(program, file)
    return len(file.getvalue())


@pytest.mark.parametrize("strict", mostly_heavy([False, True]))
@pytest.mark.parametrize("name", mostly_heavy([*NETWORKS]))
def test_programs_give_the_same_bit_for_bit(name: str, strict: bool) -> None:
    masked, x = masked_timm(name), clothes()
    program = program_of(masked, x, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with torch.no_grad():
        for found in (program.module()(x), torch.export.load(file).module()(x)):
            assert found.equal(masked(x))
        assert not masked(x).allclose(masked.frozen(x), rtol=0.1)


@pytest.mark.parametrize("name", mostly_heavy([*NETWORKS]))
def test_onnx_runtime_gives_the_same_and_the_file_is_no_larger_than_a_view(name: str) -> None:
    masked, x = masked_timm(name), clothes()
    data = onnx_of(masked, x)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    expected = masked(x).detach()
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(data) < 1.05 * len(onnx_of(masked.view(), x))


def test_what_counts_is_what_the_scores_are_when_it_is_exported() -> None:
    masked, x = masked_digits().eval(), digits()
    before = masked(x)
    perturb_scores(masked, seed=9)  # and no call in between
    masked.scores.requires_grad_(False)
    program = program_of(masked, x)
    assert program.module()(x).equal(masked(x))
    assert not before.allclose(masked(x))
    key = next(iter(masked.scores))
    masked.scores[key] = nn.Parameter(-masked.scores[key])
    masked.base[0].weight = nn.Parameter(2 * masked.base[0].weight, requires_grad=False)
    again = program_of(masked, x).module()(x)
    assert again.equal(masked(x))
    assert not again.allclose(program.module()(x))


@pytest.mark.parametrize("strict", [False, True])
def test_the_active_mask_is_exported_and_no_other(tmp_path: Path, strict: bool) -> None:
    x = digits()
    masked = MaskedModel.from_pretrained(digits_base(), saved(tmp_path / "one.smn", 1)).eval()
    alone = size_of(program_of(masked, x, strict=strict))
    masked.load_mask(saved(tmp_path / "two.smn", 2, rule="topk", active_share=0.5), name="two")
    programs = {"default": program_of(masked, x, strict=strict)}
    assert size_of(programs["default"]) == pytest.approx(alone, rel=0.02)
    with masked.using("two"):
        programs["two"] = program_of(masked, x, strict=strict)
    for name, program in programs.items():
        with masked.using(name):
            assert program.module()(x).equal(masked(x))
    with masked.disable_mask():
        program = program_of(masked, x, strict=strict)
        assert program.module()(x).equal(digits_base().eval()(x))
    masked.set_mask("two")
    assert program_of(masked, x, strict=strict).module()(x).equal(masked(x))


@pytest.mark.parametrize("norm", ["adapt", "frozen", "anchored"])
def test_in_train_mode_statistics_move_as_the_models_do(norm: str) -> None:
    masked = masked_digits(norm=norm).train()
    before, twin, x = copy.deepcopy(masked), copy.deepcopy(masked), digits()
    program = program_of(masked, x).module()
    for seed in (1, 2):
        torch.testing.assert_close(program(digits(seed)), twin(digits(seed)))
    moved = {name: value for name, value in program.named_buffers() if "running_mean" in name}
    for name, value in twin.named_buffers():
        if name in moved:
            torch.testing.assert_close(moved[name], value)
    assert any(not value.equal(before.get_buffer(name)) for name, value in moved.items()) == (norm == "adapt")
    with pytest.raises(Exception, match="strict=False"):
        program_of(masked, x, strict=True)


def test_inside_of_another_module_and_by_a_method() -> None:
    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = masked_timm("resnet")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward_features(x).mean(1)

    x, maps = clothes(), Maps().eval()
    for strict in (False, True):
        found = program_of(maps, x, strict=strict).module()(x)
        assert found.equal(maps(x))


def test_a_model_is_as_it_was_after_it_was_exported() -> None:
    masked, x = masked_digits().train(), digits()
    twin = copy.deepcopy(masked)
    for strict in (False, True):
        program_of(masked.eval(), x, strict=strict)
    for model in (masked, twin):
        optimizer = sgd(model.train())
        loss_of(model(x)).backward()
        optimizer.step()
        model.eval()
    assert masked(x).equal(twin(x))
    for (_, ours), (_, theirs) in zip(masked.state_dict().items(), twin.state_dict().items(), strict=True):
        assert ours.equal(theirs)


def test_a_rule_of_any_kind_and_a_part_of_the_weights() -> None:
    for settings in ({"rule": "threshold", "fraction": 0.5}, {"rule": "progressive_topk", "active_share": 0.3}):
        masked = get_masked_model(digits_base(), MaskConfig(**settings)).eval()
        masked.progress = 0.7
        perturb_scores(masked)
        x = digits()
        assert program_of(masked, x).module()(x).equal(masked(x))


def test_where_values_cannot_be_told_the_error_says_what_can_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Originals, "note", lambda *_: None)
    with pytest.raises(ExportError, match=r"masked\.view\(\)"):
        program_of(masked_digits().eval(), digits())
