"""Gradients are written over where they lie, but never those that somebody else still needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, get_masked_model
from selfmask.masking import effective


class Shared(nn.Module):
    """Uses weights in ways that make autograd hand one gradient to several of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.b = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "sum":
            return x @ (self.a + self.b)
        if self.way == "sum of views":
            return x @ (self.a.view(36) + self.b.view(36)).view(6, 6)
        if self.way == "joined":
            return torch.cat([x, x], 1) @ torch.cat([self.a, self.b])
        if self.way == "transposed":
            return x @ self.a.T @ self.b.T
        if self.way == "summed up":  # the gradient is one number, expanded
            return x * self.a.sum() + x @ self.b
        return (x @ self.a + x @ self.b) * self.a.mean()


WAYS = ["sum", "sum of views", "joined", "transposed", "summed up", "twice"]


def gradients(way: str, passes: int, *, reuse: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    torch.manual_seed(0)
    masked = get_masked_model(Shared(way), MaskConfig(select="all"))
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.copy_(torch.randn(score.shape))
    if not reuse:
        monkeypatch.setattr(effective, "_is_ours_alone", lambda _: False)
    x = torch.randn(5, 6)
    sum(masked(x + number).square().mean() for number in range(passes)).backward()  # type: ignore[union-attr]
    monkeypatch.undo()
    return [score.grad.clone() for score in masked.scores.parameters() if score.grad is not None]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_shared_stay_whole(way: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = gradients(way, passes, reuse=False, monkeypatch=monkeypatch)
    reused = gradients(way, passes, reuse=True, monkeypatch=monkeypatch)
    assert len(fresh) == 2
    for a, b in zip(fresh, reused, strict=True):
        assert torch.equal(a, b)


def test_gradients_that_are_asked_for_stay_whole() -> None:
    """`torch.autograd.grad` keeps what it gives out."""
    torch.manual_seed(0)
    masked = get_masked_model(nn.Sequential(nn.Linear(6, 6, bias=False)), MaskConfig(select="all"))
    weights = masked._replacements()
    (name,) = weights
    x = torch.randn(4, 6)
    loss = masked(x).square().sum()
    kept, _ = torch.autograd.grad(loss, (weights[name], next(iter(masked.scores.parameters()))))
    dense = weights[name].detach().clone().requires_grad_()
    (x @ dense.T).square().sum().backward()
    torch.testing.assert_close(kept, dense.grad)


def test_the_memory_of_a_gradient_that_is_ours_alone_is_used_again() -> None:
    seen: list[bool] = []
    own = effective._is_ours_alone

    def watched(grad: Tensor) -> bool:
        seen.append(own(grad))
        return seen[-1]

    masked = get_masked_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 6)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effective, "_is_ours_alone", watched)
        (masked(torch.randn(2, 3, 4, 4)).sum() + masked(torch.randn(2, 3, 4, 4)).sum()).backward()
    assert any(seen)


# In a process of its own: what is asked for is asked for when the module is imported.
WITHOUT = """
import torch
from torch import nn
if {storage}:
    del torch._C._storage_Use_Count
else:
    torch.Tensor._use_count = property(lambda tensor: tensor.no_such_attribute)

from selfmask import MaskConfig, get_masked_model
from selfmask.masking import effective

torch.manual_seed(0)
answers = []
own = effective._is_ours_alone
effective._is_ours_alone = lambda grad: answers.append(own(grad)) or answers[-1]
masked = get_masked_model(nn.Linear(6, 6), MaskConfig(select="all"))
masked(torch.ones(2, 6)).square().sum().backward()
assert answers and not any(answers), answers
print([score.grad.double().sum().item() for score in masked.scores.values()])
"""


@pytest.mark.heavy
@pytest.mark.parametrize("storage", [True, False])
def test_where_pytorch_does_not_tell_nothing_is_written_over(storage: bool) -> None:
    """Releases may drop what is private; gradients are right without it, and take a little longer."""
    command = [sys.executable, "-c", WITHOUT.replace("{storage}", str(storage))]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    masked = get_masked_model(nn.Linear(6, 6), MaskConfig(select="all"))
    masked(torch.ones(2, 6)).square().sum().backward()
    expected = [score.grad.double().sum().item() for score in masked.scores.values() if score.grad is not None]
    assert json.loads(done.stdout) == pytest.approx(expected, rel=1e-6)
