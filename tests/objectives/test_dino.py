"""DINO against a naive oracle in plain loops, and its parts: teacher, centre, schedules, state."""

from __future__ import annotations

import copy
import io
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from selfmask import AdaptConfig, MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import ConfigError
from selfmask.objectives import Objective
from selfmask.objectives.base import Context
from selfmask.objectives.dino import DINO, DINOConfig, Teacher

from . import small

torch.set_num_threads(1)
IMAGES, FEATURES = 4, 7
SIZES = (8, 8, 4)
TINY = {"hidden": 9, "bottleneck": 6, "out_dim": 5, "freeze_last_layer": 0.0}
Array = Any
backbone = partial(small.backbone, FEATURES)


def objective(model: nn.Module | None = None, seed: int = 0, **settings: Any) -> DINO:
    """With heads and a centre that have learned something, and with a teacher's head other than the student's."""
    dino = DINO(model or backbone(), torch.full((FEATURES,), 0.1), DINOConfig(**{**TINY, **settings}), seed=seed)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in [*dino.head.parameters(), *dino.teacher_head.parameters()]:
            parameter.add_(torch.randn_like(parameter) * (0.8 if parameter.dim() > 1 else 0.1))
        dino.centre.copy_(torch.randn(dino.config.out_dim) * 0.1)
    return dino


def batches(count: int, images: int = IMAGES, sizes: tuple[int, ...] = SIZES) -> list[list[Tensor]]:
    torch.manual_seed(2)
    return [
        [common + torch.randn(images, 3, size, size) for size in sizes]
        for common in (2 * torch.randn(count, images, 3, 1, 1)).unbind()
    ]


def with_norm(norm: str = "adapt", dropout: float = 0.0, **settings: Any) -> MaskedModel:
    torch.manual_seed(5)
    base = nn.Sequential(
        nn.Conv2d(3, FEATURES, 3),
        nn.BatchNorm2d(FEATURES),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    masked = get_masked_model(base.eval(), MaskConfig(norm=norm, **settings))  # type: ignore[arg-type]
    if norm == "anchored":
        masked.anchor([batches(1, 16)[0][0]])
    return masked.train()


def step(dino: DINO, model: nn.Module, batch: list[Tensor], progress: float, parts: int = 1) -> Tensor:
    """One step of SGD, as the loop makes it; parameters that get no gradient are handed to it, too."""
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD([*learns, *dino.parameters()], lr=0.5, weight_decay=0.01)
    optimizer.zero_grad()
    dino.before_step(model, progress)
    losses = []
    for part in range(parts):
        size = len(batch[0]) // parts
        loss, _ = dino.loss(model, [view[part * size : (part + 1) * size] for view in batch], progress)
        (loss / parts).backward()
        losses.append(loss.detach())
    dino.after_backward(model, progress)
    optimizer.step()
    dino.after_step(model, progress)
    return torch.stack(losses).mean()


# ---- the oracle: float64, one number at a time ---------------------------------------------------------------


def naive_softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


def unit(vector: Array) -> Array:
    return vector / math.sqrt(sum(float(x) ** 2 for x in vector))


def gelu(vector: Array) -> Array:
    return np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in vector])


def naive_point(vector: Array, head: list[Array]) -> Array:
    w1, b1, w2, b2, w3, b3, _ = head
    return unit(w3 @ gelu(w2 @ gelu(w1 @ vector + b1) + b2) + b3)


def naive_outputs(vector: Array, head: list[Array]) -> list[float]:
    point = naive_point(vector, head)
    return [float(unit(row) @ point) for row in head[-1]]


def naive_loss(student: Array, targets: list[list[list[float]]], head: list[Array], temperature: float) -> float:
    """For the student's features [views, images, dimensions] and targets [large views, images, K]."""
    pairs = []
    for u in range(len(targets)):
        for v in range(len(student)):
            if u == v:
                continue
            for i in range(len(student[v])):
                p = naive_softmax([x / temperature for x in naive_outputs(student[v][i], head)])
                pairs.append(-sum(q * math.log(p[k]) for k, q in enumerate(targets[u][i])))
    return sum(pairs) / len(pairs)


def naive_targets(features: Array, head: list[Array], centre: Array, temperature: float) -> list[list[list[float]]]:
    centred = [[np.array(naive_outputs(row, head)) - centre for row in view] for view in features]
    return [[naive_softmax(list(row / temperature)) for row in view] for view in centred]


def arrays(module: nn.Module) -> list[Array]:
    return [parameter.detach().double().numpy().copy() for parameter in module.parameters()]


@pytest.mark.parametrize("sizes", [(8, 8), SIZES])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.3, "teacher_temperature": 0.2, "teacher_warmup": 0.5}])
def test_loss_equals_the_oracle(sizes: tuple[int, ...], settings: dict[str, float]) -> None:
    model, teacher, batch = backbone(), backbone(seed=9), batches(1, sizes=sizes)[0]
    dino, progress = objective(teacher, **settings), 0.2
    loss, health = dino.loss(model, batch, progress)
    theirs = np.stack([teacher(view).detach().double().numpy() for view in batch[:2]])
    centre = dino.centre.double().numpy()
    warm = 0.2 / dino.config.teacher_warmup
    temperature = 0.04 + warm * (dino.config.teacher_temperature - 0.04)
    targets = naive_targets(theirs, arrays(dino.teacher_head), centre, temperature)
    mine, head = np.stack([model(view).detach().double().numpy() for view in batch]), arrays(dino.head)
    expected = naive_loss(mine, targets, head, dino.config.temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert float(health.spread or 0) > 0.2  # the test is of images that differ
    entropy = np.mean([-sum(q * math.log(q) for q in row if q > 0) for view in targets for row in view])
    points = np.stack([naive_point(row, head) for view in mine for row in view])
    numbers = {name: float(value) for name, value in health.numbers().items()}
    assert numbers == {
        "ln_k": pytest.approx(math.log(5)),
        "spread": pytest.approx(1 - float((points.mean(0) ** 2).sum()), abs=1e-5),
        "teacher_entropy": pytest.approx(entropy, rel=1e-4),
        "kl": pytest.approx(expected - entropy, rel=1e-4),
        "teacher_momentum": dino.config.teacher_momentum_at(progress),
    }


def test_gradients_equal_finite_differences_of_the_oracle() -> None:
    """Of the student's features and head alone: the targets are held fixed, and the teacher gets none."""
    dino = objective(nn.Identity(), temperature=0.3)
    torch.manual_seed(4)
    features = torch.randn(3, 2, FEATURES, requires_grad=True)
    dino.loss(nn.Identity(), list(features), 0.0)[0].backward()
    values, head = features.detach().double().numpy().copy(), arrays(dino.head)
    targets = naive_targets(values[:2].copy(), arrays(dino.teacher_head), dino.centre.double().numpy(), 0.04)
    for tensor, array in zip([features, *dino.head.parameters()], [values, *head], strict=True):
        assert tensor.grad is not None
        for index in np.ndindex(array.shape):
            kept, results = array[index], []
            for change in (1e-5, -1e-5):
                array[index] = kept + change
                results.append(naive_loss(values, targets, head, 0.3))
            array[index] = kept
            slope = (results[0] - results[1]) / 2e-5
            assert float(tensor.grad[index]) == pytest.approx(slope, rel=1e-3, abs=1e-5)
    assert all(parameter.grad is None for parameter in [*dino.teacher_head.parameters(), *dino.teacher.parameters()])
    learns = {name.partition(".")[0] for name, parameter in objective().named_parameters() if parameter.requires_grad}
    assert learns == {"head"}


# ---- what follows the student --------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_centre_and_teacher_are_running_means(parts: int) -> None:
    """Over five steps, against sums written out; parts of a batch move the centre once."""
    model = get_masked_model(backbone())
    dino = objective(model, teacher_momentum=0.6, centre_momentum=0.8)
    score, head = model.scores["conv/weight"], dino.head.last.weight
    mean, head_mean = score.detach().double(), dino.teacher_head.last.weight.detach().double()
    centre = dino.centre.double()
    for index, batch in enumerate(batches(5)):
        torch.testing.assert_close(dino.teacher.scores["conv/weight"].detach().double(), mean)
        with torch.no_grad():
            vectors = dino.teacher(batch[:2], index / 5)
            outputs = dino.teacher_head.outputs(dino.teacher_head.points(vectors)).double()
        step(dino, model, batch, index / 5, parts)
        momentum = 1 - (1 - 0.6) * (math.cos(math.pi * index / 5) + 1) / 2
        mean = momentum * mean + (1 - momentum) * score.detach().double()
        head_mean = momentum * head_mean + (1 - momentum) * head.detach().double()
        centre = 0.8 * centre + 0.2 * outputs.mean(0)
        torch.testing.assert_close(dino.centre.double(), centre, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dino.teacher_head.last.weight.detach().double(), head_mean, rtol=1e-5, atol=1e-6)
    assert not torch.equal(mean.float(), score)


def test_parts_of_a_batch_give_the_gradients_of_the_whole() -> None:
    whole, halves = [], []
    for parts, results in ((1, whole), (2, halves)):
        model = get_masked_model(backbone())
        dino = objective(model, teacher_momentum=0.6)
        results += [step(dino, model, batch, index / 4, parts) for index, batch in enumerate(batches(4))]
        results += [*model.scores.values(), *dino.state_dict().values()]
    for one, other in zip(whole, halves, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_schedules() -> None:
    config = DINOConfig(teacher_temperature_start=0.02, teacher_temperature=0.06, teacher_warmup=0.4)
    temperatures = [config.teacher_temperature_at(progress) for progress in (0.0, 0.1, 0.2, 0.4, 0.99)]
    assert temperatures == pytest.approx([0.02, 0.03, 0.04, 0.06, 0.06])
    assert DINOConfig(teacher_warmup=0.0).teacher_temperature_at(0.0) == 0.07
    momenta = [DINOConfig().teacher_momentum_at(progress) for progress in (0.0, 0.5, 1.0)]
    assert momenta == pytest.approx([0.996, 0.998, 1.0])


def test_the_last_layer_rests_at_first() -> None:
    model = get_masked_model(backbone())
    dino = objective(model, freeze_last_layer=0.5)
    for index, batch in enumerate(batches(6)):
        last, first = dino.head.last.weight.detach().clone(), dino.head.mlp[0].weight.detach().clone()
        step(dino, model, batch, index / 6)
        assert torch.equal(dino.head.last.weight, last) == (index < 3)
        assert not torch.equal(dino.head.mlp[0].weight, first)


@pytest.mark.parametrize("rule", ["threshold", "topk", "progressive_topk"])
def test_the_teachers_mask_is_that_of_the_mean_of_scores(rule: str) -> None:
    model = get_masked_model(backbone(), MaskConfig(rule=rule, score_init="kaiming", mu=0.01, fraction=0.7))
    dino = objective(model, teacher_momentum=0.5)
    mean = {name: score.detach().clone() for name, score in model.scores.items()}
    for index, batch in enumerate(batches(5)):
        model.progress = index / 5
        step(dino, model, batch, index / 5)
        for name, score in model.scores.items():
            mean[name].lerp_(score.detach(), 1 - dino.config.teacher_momentum_at(index / 5))
    expected = copy.deepcopy(model)
    expected.progress = 0.9
    with torch.no_grad():
        for name, score in expected.scores.items():
            score.copy_(mean[name])
    views = batches(1)[0][:2]
    with torch.no_grad():
        theirs = dino.teacher(views, 0.9)
        assert torch.equal(theirs, expected(torch.cat(views)))
        assert not torch.equal(theirs, model(torch.cat(views)))  # the student is elsewhere


@pytest.mark.parametrize("norm", ["adapt", "frozen", "recalibrate", "anchored"])
def test_the_teacher_has_statistics_and_modes_of_its_own(norm: str) -> None:
    """They begin as the student's; calls of the one never change the other, and never the base."""
    model = with_norm(norm, dropout=0.5)
    base = {name: value.clone() for name, value in model.base.state_dict().items()}
    dino = objective(model)

    def statistics(module: nn.Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in module._norm.named_buffers()}

    def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return all(torch.equal(value, other[name]) for name, value in one.items())

    assert same(statistics(model), statistics(dino.teacher))
    before = statistics(model)
    views = batches(1, 8)[0][:2]
    model.eval()
    modes = [module.training for module in model.modules()]
    first = dino.teacher(views, 0.0)
    assert [module.training for module in model.modules()] == modes
    assert same(statistics(model), before)
    assert same(statistics(dino.teacher), before) == (norm in ("frozen", "anchored"))
    assert torch.equal(dino.teacher(views, 0.0), first) or norm == "frozen"  # nothing is dropped out
    # In train mode, and without dropout, the student gives what the teacher gives.
    model.train()
    model.base[3].eval()
    moved = statistics(dino.teacher)
    with torch.no_grad():
        assert torch.equal(model(torch.cat(views)), first)
    assert same(statistics(dino.teacher), moved)
    assert same(model.base.state_dict(), base)
    # In eval mode it uses the running ones.
    dino.eval()
    dino.teacher(views, 0.0)
    assert same(statistics(dino.teacher), moved)


# ---- state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["adapt", "anchored"])
def test_state_holds_nothing_of_the_base(norm: str) -> None:
    model = with_norm(norm)
    dino = objective(model)
    state = dino.state_dict()
    places = {value.untyped_storage().data_ptr() for value in model.base.state_dict().values()}
    assert not places & {value.untyped_storage().data_ptr() for value in state.values()}
    heads = {f"{head}.{name}" for head in ("head", "teacher_head") for name in dino.head.state_dict()}
    teachers = {f"teacher.{name}" for name in model.state_dict() if not name.startswith("base.")}
    assert state.keys() == heads | teachers | {"centre"}
    assert {"teacher.scores.0/weight", "teacher._norm.1/running_mean"} <= teachers
    # What the teacher does not own, it does not copy either.
    (twin,) = dino.teacher._twin
    for kind in ("parameters", "buffers"):
        pairs = zip(getattr(twin.base, kind)(), getattr(model.base, kind)(), strict=True)
        assert all(one is other for one, other in pairs)


@pytest.mark.parametrize("plain", [False, True])
def test_a_run_goes_on_exactly_from_its_state(plain: bool) -> None:
    """Through a file, into objects made anew with another seed; of a network with full weights, too."""

    def parts(seed: int) -> tuple[nn.Module, DINO]:
        model = with_norm() if not plain else with_norm().base.requires_grad_(True).train()
        return model, objective(model, seed, teacher_momentum=0.7, freeze_last_layer=0.2)

    model, dino = parts(0)
    for index in range(6):
        step(dino, model, batches(12)[index], index / 12)
    file = io.BytesIO()
    torch.save([model.state_dict(), dino.state_dict()], file)
    file.seek(0)
    again, resumed = parts(9)
    for module, state in zip((again, resumed), torch.load(file, weights_only=True), strict=True):
        module.load_state_dict(state)
    for index in range(6, 12):
        losses = [step(one, of, batches(12)[index], index / 12) for one, of in ((dino, model), (resumed, again))]
        assert torch.equal(*losses)
    for one, other in ((model, again), (dino, resumed)):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_the_teacher_of_a_plain_network_is_the_mean_of_its_weights() -> None:
    model = with_norm().base.requires_grad_(True).train()
    model[1].bias.requires_grad_(False)  # what does not learn is shared
    dino = objective(model, teacher_momentum=0.5)
    weight = model[0].weight
    mean = weight.detach().clone()
    for index, batch in enumerate(batches(3)):
        step(dino, model, batch, index / 3)
        mean.lerp_(weight.detach(), 1 - dino.config.teacher_momentum_at(index / 3))
    state = dino.state_dict()
    assert torch.equal(state["teacher.model.0.weight"], mean)
    assert not torch.equal(mean, weight)
    assert not torch.equal(state["teacher.model.1.running_mean"], model[1].running_mean)
    assert dino.teacher.model[1].bias is model[1].bias


def test_heads_depend_on_their_seed_alone_and_begin_alike() -> None:
    def fresh(seed: int) -> DINO:
        return DINO(backbone(), torch.zeros(FEATURES), DINOConfig(**TINY), seed=seed)

    torch.manual_seed(5)
    model = backbone()
    state = torch.get_rng_state()
    first = DINO(model, torch.zeros(FEATURES), DINOConfig(**TINY), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(first, Objective)
    for name, value in first.head.state_dict().items():
        assert torch.equal(value, fresh(3).head.state_dict()[name])
        assert torch.equal(value, first.teacher_head.state_dict()[name])
    assert not torch.equal(first.head.last.weight, fresh(4).head.last.weight)


def test_the_head_begins_with_features_less_their_mean() -> None:
    """Else images would be alike to it: backbones give all of them much in common."""
    model, images = get_masked_model(backbone()), batches(1, 16)[0][0]

    def frozen(view: Tensor) -> Tensor:
        return model.frozen(view) + 100

    context = Context(model, FEATURES, 2, 0, frozen, lambda: [images], 1, Tensor, Tensor, lambda: (Tensor(), None))
    dino = DINOConfig(**TINY).build(context)
    assert float(1 - dino.head.points(frozen(images)).mean(0).square().sum().detach()) > 0.5
    assert dino.large_crops == 2


def test_measuring_leaves_the_centre_alone() -> None:
    model = backbone()
    dino = objective(model).eval()
    before = dino.centre.clone()
    dino.loss(model, batches(1)[0], 0.5)
    dino.after_step(model, 0.5)
    assert torch.equal(dino.centre, before)


def test_sixteen_bit_autocast_reaches_the_backbones_only() -> None:
    model, batch = backbone(), batches(1)[0]
    dino = objective(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = dino.loss(model, batch, 0.0)
        features = [model(view).detach() for view in batch]
    assert features[0].dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    plain = objective(nn.Identity())
    torch.testing.assert_close(loss, plain.loss(nn.Identity(), features, 0.0)[0], rtol=1e-5, atol=0)


# ---- settings and bad input ----------------------------------------------------------------------------------


def test_it_is_an_objective_by_name() -> None:
    assert AdaptConfig(objective="dino").objective == DINOConfig()  # type: ignore[arg-type]
    config = AdaptConfig.preset("paper", objective="dino")
    assert config.objective == DINOConfig()
    assert config.chosen_views == DINOConfig.views
    assert (config.chosen_views.large_scale, config.chosen_views.small_scale) == ((0.4, 1.0), (0.05, 0.4))
    assert AdaptConfig(objective=DINOConfig(out_dim=64)).to_dict()["objective"]["out_dim"] == 64


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden": 0},
        {"bottleneck": 1.5},
        {"out_dim": 1},
        {"temperature": 0.0},
        {"teacher_temperature": -1},
        {"teacher_temperature_start": float("nan")},
        {"teacher_warmup": 1.1},
        {"teacher_momentum": 1.01},
        {"centre_momentum": "slow"},
        {"freeze_last_layer": -0.1},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DINOConfig(**settings)


def test_too_few_or_unequal_views_are_refused() -> None:
    views = batches(1)[0]
    for wrong in (views[:1], [], [views[0], views[1][:2]]):
        with pytest.raises(ConfigError, match="views"):
            objective().loss(backbone(), wrong, 0.0)


def test_of_a_model_that_does_not_learn_the_teacher_is_that_model() -> None:
    """Nothing that learns is nothing to follow."""
    model = backbone().requires_grad_(False)
    teacher = Teacher(model)
    teacher.follow(model, 0.5)
    assert all(one is other for one, other in zip(teacher.parameters(), model.parameters(), strict=True))
