"""Many threads on one base: every output is that of a thread alone, and the base is as it was, to the bit."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.embedding.embedder import MASK, MaskVariants
from selfmask.errors import ConfigError, UnknownMaskError

from .architectures import ARCHITECTURES, as_tensor, base_of, digits_base, inputs_of, loss_of, perturb_scores, state_of
from .digits import images, masked_digits, saved

NAMES = ["one", "two", "three", "four", "five"]


@contextmanager
def many_switches() -> Iterator[None]:
    """Threads take turns as often as they can, so that what can go wrong does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    with many_switches():
        yield


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call `work` with the numbers of so many threads, which start as one; an error of any of them is ours."""
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        with torch.no_grad():
            work(number)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(run, number) for number in range(count)]:
            done.result()


def digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in module.state_dict().items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("masks")
    return {name: saved(folder / f"{name}.smn", seed) for seed, name in enumerate([*NAMES, "spare"])}


@pytest.fixture
def masked(files: dict[str, Path]) -> MaskedModel:
    """Five masks on one base, in eval mode."""
    masked = MaskedModel.from_pretrained(digits_base(), files["one"], name="one")
    for name in NAMES[1:]:
        masked.load_mask(files[name], name)
    return masked.eval()


@torch.no_grad()
def expected_of(masked: MaskedModel, batches: list[Tensor]) -> dict[str | None, list[Tensor]]:
    """The outputs by one thread, by mask, and without one."""
    found: dict[str | None, list[Tensor]] = {}
    for name in NAMES:
        with masked.using(name):
            found[name] = [masked(batch) for batch in batches]
    with masked.disable_mask():
        found[None] = [masked(batch) for batch in batches]
    assert len({output.sum().item() for outputs in found.values() for output in outputs}) == 6 * len(batches)
    return found


# ---- stress -----------------------------------------------------------------------------------------------------


def test_two_threads_and_one_mask(files: dict[str, Path]) -> None:
    masked = MaskedModel.from_pretrained(digits_base(), files["one"]).eval()
    before, x = digest(masked.base), images()
    with torch.no_grad():
        expected = masked(x)
    wrong = []

    def work(_: int) -> None:
        for _ in range(150):
            wrong.append(not torch.equal(masked(x), expected))

    in_threads(2, work)
    assert (sum(wrong), len(wrong)) == (0, 300)
    assert digest(masked.base) == before


def test_eight_threads_and_five_masks(masked: MaskedModel, files: dict[str, Path]) -> None:
    """2,000 calls of every kind, while masks come and go."""
    before, batches = digest(masked.base), [images(seed, n=4) for seed in range(3)]
    expected = expected_of(masked, batches)
    calls: list[bool] = []

    def work(number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        for turn in range(250):
            name, batch = (int(torch.randint(n, (), generator=draw)) for n in (len(NAMES), len(batches)))
            mask: str | None = NAMES[name]
            x = batches[batch]
            match (turn + number) % 8:
                case 0:
                    output = masked.view(mask)(x)
                case 1:
                    with masked.disable_mask():
                        output, mask = masked(x), None
                case 2:
                    output, mask = masked.frozen(x), None
                case 3:
                    with masked.lock:
                        masked.set_mask(NAMES[name])
                        output = masked(x)
                case 4:
                    with masked.using(NAMES[name]):
                        output = masked.merge_and_unload()(x)
                case _:
                    with masked.using(NAMES[name]):
                        output = masked(x)
            calls.append(torch.equal(output, expected[mask][batch]))
            if turn % 25 == 0:
                own = f"spare {number}"
                masked.load_mask(files["spare"], own)
                with masked.using(own):
                    masked.recalibrate([x])
                    masked.pack()
                masked.delete_mask(own)

    in_threads(8, work)
    assert (sum(calls), len(calls)) == (2000, 2000)
    assert digest(masked.base) == before
    assert masked.mask_names == NAMES


def test_views_in_threads(masked: MaskedModel) -> None:
    """The same views in all threads, while another switches the masks of the base below them."""
    before, batches = digest(masked.base), [images(seed, n=4) for seed in range(3)]
    expected = expected_of(masked, batches)
    views = {name: masked.view(name) for name in NAMES}

    def work(number: int) -> None:
        for turn in range(60):
            name, batch = NAMES[(number + turn) % len(NAMES)], turn % len(batches)
            if number:
                assert torch.equal(views[name](batches[batch]), expected[name][batch])
            else:
                masked.set_mask(name)
                masked(batches[batch])

    in_threads(4, work)
    assert digest(masked.base) == before


def test_two_masked_models_on_one_base(files: dict[str, Path]) -> None:
    """What is changed while they run are the modules that they share."""
    base = digits_base()
    whole = nn.Sequential(base, nn.Linear(10, 3))
    models = [MaskedModel.from_pretrained(base, files[name]).eval() for name in NAMES[:2]]
    models.append(get_masked_model(whole).eval())
    perturb_scores(models[2])
    before, x = digest(whole), images()
    with torch.no_grad():
        expected = [model(x) for model in models]

    def work(number: int) -> None:
        for _ in range(50):
            assert torch.equal(models[number](x), expected[number])

    in_threads(3, work)
    assert digest(whole) == before


def test_models_that_share_nothing_do_not_wait(masked: MaskedModel) -> None:
    activation = nn.ReLU()
    one, other = (get_masked_model(nn.Sequential(nn.Linear(2, 2), activation)) for _ in range(2))
    with one.lock, ThreadPoolExecutor(1) as pool:
        pool.submit(other, torch.ones(1, 2)).result(timeout=60)


def test_recalibrating_while_others_run(masked: MaskedModel) -> None:
    alone = copy.deepcopy(masked)
    batches = [images(seed) for seed in range(20, 40)]
    with alone.using("five"):
        alone.recalibrate(batches)
    before, x = digest(masked.base), images()
    with torch.no_grad():
        expected = {name: alone.view(name)(x) for name in NAMES}

    def work(number: int) -> None:
        with masked.using(NAMES[number - 4]):
            if number == 3:
                with masked.using("five"):
                    masked.recalibrate(batches)
            else:
                for _ in range(60):
                    assert torch.equal(masked(x), expected[NAMES[number - 4]])

    in_threads(4, work)
    with masked.using("five"), torch.no_grad():
        assert torch.equal(masked(x), expected["five"])
    assert digest(masked.base) == before
    assert not any(module.training for module in masked.modules())


def test_training_in_one_thread_and_using_in_another(files: dict[str, Path]) -> None:
    """The trained mask is that of a run that nobody disturbs, and so is what others see."""
    alone, shared = masked_digits(), masked_digits()
    for masked in (alone, shared):
        masked.load_mask(files["two"], "two")
        masked.train()
    x, over = images(), threading.Event()
    expected = [alone.view("two")(x), alone.frozen(x)]

    def train(masked: MaskedModel) -> None:
        optimizer = torch.optim.SGD(masked.scores.parameters(), lr=5.0, momentum=0.9)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(masked(images(step))).backward()
            optimizer.step()

    def work(number: int) -> None:
        if number:
            while not over.is_set():
                assert torch.equal(shared.view("two")(x), expected[0])
                assert torch.equal(shared.frozen(x), expected[1])
                with shared.using("two"):
                    shared(x)  # in train mode: neither the mask nor the base may move
        else:
            with torch.enable_grad():
                train(shared)
            over.set()

    train(alone)
    in_threads(3, work)
    assert torch.equal(shared.eval()(x), alone.eval()(x))


# ---- who sees what ----------------------------------------------------------------------------------------------


def elsewhere(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_choice_is_seen_where_it_was_made(masked: MaskedModel) -> None:
    with masked.using("two"):
        assert masked.active_mask == "two"
        assert elsewhere(lambda: masked.active_mask) == "one"
        with masked.disable_mask():
            assert masked.active_mask is None
            assert elsewhere(lambda: masked.active_mask) == "one"
            with masked.using("three"):
                assert masked.active_mask == "three"
            assert masked.active_mask is None
        assert masked.active_mask == "two"
    assert masked.active_mask == "one"


def test_a_choice_is_that_of_one_model(masked: MaskedModel) -> None:
    other = copy.deepcopy(masked)
    with masked.using("two"):
        assert other.active_mask == "one"
        assert copy.deepcopy(masked).active_mask == "one"
        with other.disable_mask():
            assert (masked.active_mask, other.active_mask) == ("two", None)


def test_set_mask_is_for_all(masked: MaskedModel) -> None:
    with masked.using("two"):
        elsewhere(lambda: masked.set_mask("three"))
        assert masked.active_mask == "two"
        masked.set_mask("four")
        assert masked.active_mask == "two"
    assert masked.active_mask == elsewhere(lambda: masked.active_mask) == "four"


def test_tasks_of_one_thread_have_choices_of_their_own(masked: MaskedModel) -> None:
    async def chosen(name: str) -> str | None:
        with masked.using(name):
            await asyncio.sleep(0)
            return masked.active_mask

    async def both() -> list[str | None]:
        return await asyncio.gather(*map(chosen, NAMES))

    assert asyncio.run(both()) == NAMES


def test_all_that_speaks_of_the_active_mask_speaks_of_the_chosen_one(masked: MaskedModel) -> None:
    masked.set_mask("two")
    facts = masked.pack().sha256, masked.sparsity(), masked.mask_bytes()
    masked.set_mask("one")
    assert masked.pack().sha256 != facts[0]
    with masked.using("two"):
        assert (masked.pack().sha256, masked.sparsity(), masked.mask_bytes()) == facts
    with pytest.raises(UnknownMaskError, match="six"), masked.using("six"):
        pass


def test_a_mask_that_another_thread_deleted(masked: MaskedModel) -> None:
    with masked.using("two"):
        with pytest.raises(UnknownMaskError):
            masked.delete_mask("two")
        elsewhere(lambda: masked.delete_mask("two"))
        with pytest.raises(UnknownMaskError, match="no mask named 'two'"):
            masked(images())
        with pytest.raises(UnknownMaskError, match="no mask named 'two'"):
            masked.pack()
    masked(images())


# ---- who waits for whom -----------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Stops those who come through while it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.open = threading.Event(), threading.Event()
        self.open.set()

    def forward(self, x: Tensor) -> Tensor:
        self.arrived.set()
        assert self.open.wait(60)
        return x

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        return nn.Identity()


Waiting = Callable[[MaskedModel, Path], object]
WAITING: dict[str, Waiting] = {
    "forward": lambda masked, _: masked(images()),
    "frozen": lambda masked, _: masked.frozen(images()),
    "set_mask": lambda masked, _: masked.set_mask("two"),
    "load_mask": lambda masked, file: masked.load_mask(file, "new"),
    "delete_mask": lambda masked, _: masked.delete_mask("two"),
    "recalibrate": lambda masked, _: masked.recalibrate([images()]),
    "pack": lambda masked, _: masked.pack(),
    "merge_and_unload": lambda masked, _: masked.merge_and_unload(),
    "view": lambda masked, _: masked.view("two"),
    "state_dict": lambda masked, _: nn.Sequential(masked).state_dict(),
    "load_state_dict": lambda masked, _: masked.load_state_dict({}, strict=False),
    "deepcopy": lambda masked, _: copy.deepcopy(masked),
    "to": lambda masked, _: masked.to(torch.float64),
    "train": lambda masked, _: masked.train(),
    "fingerprint": lambda masked, _: MaskVariants(masked).fingerprint(MASK),
    "another on the base": lambda masked, file: MaskedModel.from_pretrained(masked.base, file),
    "a new one on the base": lambda masked, _: get_masked_model(masked.base),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_touches_the_base_waits(name: str, files: dict[str, Path]) -> None:
    """While a forward pass runs, the base holds weights that are not its own: nobody may see or change it."""
    base, gate = digits_base(), Gate()
    masked = MaskedModel.from_pretrained(nn.Sequential(base, gate), _nested(files["one"], files), name="one").eval()
    masked.load_mask(_nested(files["two"], files), "two")
    with torch.no_grad():
        expected = masked(images())
    gate.arrived.clear(), gate.open.clear()
    with ThreadPoolExecutor(2) as pool:
        running: Future[Tensor] = pool.submit(masked, images())
        assert gate.arrived.wait(60)
        assert not torch.equal(base[0].weight, digits_base()[0].weight)  # the test is about something
        waiting = pool.submit(WAITING[name], masked, _nested(files["three"], files))
        assert not wait([waiting], timeout=0.05).done
        gate.open.set()
        waiting.result(timeout=60)
        assert torch.equal(running.result(timeout=60), expected)


def _nested(file: Path, files: dict[str, Path]) -> Path:
    """The mask of a file for a base that is the first part of another."""
    path = file.with_suffix(".nested.smn")
    if not path.exists():
        inner = MaskedModel.from_pretrained(digits_base(), file, is_trainable=True)
        outer = get_masked_model(nn.Sequential(digits_base(), Gate()))
        with torch.no_grad():
            for own, other in zip(outer.scores.parameters(), inner.scores.parameters(), strict=True):
                own.copy_(other)
        outer.save_pretrained(path)
    return path


def test_views_do_not_wait(masked: MaskedModel) -> None:
    view, expected = masked.view(), masked(images())
    with ThreadPoolExecutor(2) as pool:
        with masked.lock:
            assert torch.equal(pool.submit(view, images()).result(timeout=60), expected)
            waiting = pool.submit(masked, images())
            assert not wait([waiting], timeout=0.05).done
        assert torch.equal(waiting.result(timeout=60), expected)


def test_the_lock_may_be_taken_twice(masked: MaskedModel) -> None:
    with masked.lock, masked.lock:
        masked.set_mask("two")
        masked(images())
    assert elsewhere(lambda: masked.active_mask) == "two"
    elsewhere(lambda: masked(images()))


# ---- views ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_view_gives_the_same_bits(name: str) -> None:
    masked = get_masked_model(base_of(name), MaskConfig(select=ARCHITECTURES[name].select)).eval()
    perturb_scores(masked)
    x, before = inputs_of(name), state_of(masked.base)
    view = masked.view()
    with torch.no_grad():
        assert torch.equal(as_tensor(view(x)), as_tensor(masked(x)))
        with masked.disable_mask():
            assert torch.equal(as_tensor(masked.view()(x)), as_tensor(masked(x)))
    assert type(view) is type(masked.base)
    assert not any(parameter.requires_grad for parameter in view.parameters())
    assert all(torch.equal(value, before[key]) for key, value in masked.base.state_dict().items())


def test_a_view_shares_what_is_not_masked(masked: MaskedModel) -> None:
    view = masked.view()
    own = dict(masked.base.named_parameters())
    shared = {name for name, parameter in view.named_parameters() if parameter.data_ptr() == own[name].data_ptr()}
    assert shared == set(own) - set(masked.pack().sizes)
    assert shared


def test_views_keep_ties() -> None:
    layer = nn.Linear(4, 4)
    base = nn.Sequential(layer, nn.Linear(4, 4), layer)
    base[1].weight = layer.weight
    masked = get_masked_model(base).eval()
    perturb_scores(masked)
    view = masked.view()
    assert view[0] is view[2]
    assert view[0].weight is view[1].weight
    x = torch.randn(3, 4)
    assert torch.equal(view(x), masked(x))


def test_a_view_stays_what_it_is(files: dict[str, Path]) -> None:
    """Whatever becomes of the masked model; nor does the model change with it."""
    masked, x = masked_digits().eval(), images()
    masked.load_mask(files["two"], "two")
    views = [masked.view(), masked.view("two")]
    expected = [view(x) for view in views]
    before = digest(masked.base)
    optimizer = torch.optim.SGD(masked.scores.parameters(), lr=50.0)
    loss_of(masked.train()(images(1))).backward()
    optimizer.step()
    masked.set_mask("two")
    masked.recalibrate([images(2)])
    masked.set_mask("default")
    masked.delete_mask("two")
    assert not any(view.training for view in views)
    assert all(torch.equal(view(x), output) for view, output in zip(views, expected, strict=True))
    for view in views:
        view.train()(images(3))  # moves statistics, which are the view's own
        view.to(torch.float64)
    assert digest(masked.base) == before
    view = masked.view()
    expected[0] = view(x)
    masked.to(torch.float64)
    assert torch.equal(view(x), expected[0])


def test_a_view_of_a_mask_without_statistics_of_its_own() -> None:
    masked = masked_digits(norm="frozen").eval()
    before, view = digest(masked.base), masked.view()
    assert torch.equal(view(images()), masked(images()))
    view.train()(images())
    assert digest(masked.base) == before


def test_a_view_is_an_ordinary_module(masked: MaskedModel) -> None:
    with torch.inference_mode():
        view = masked.view("two")
    x = images().requires_grad_()
    loss_of(view(x)).backward()  # made in inference mode, and yet
    with masked.using("two"):
        assert torch.equal(masked.merge_and_unload()(images()), view(images()))
    assert torch.equal(pickle.loads(pickle.dumps(view))(images()), view(images()))
    assert view.state_dict().keys() == masked.base.state_dict().keys()
    with pytest.raises(UnknownMaskError, match="six"):
        masked.view("six")


def test_a_base_that_cannot_be_viewed() -> None:
    class Odd(nn.Linear):
        def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
            return nn.Linear(4, 4)

    with pytest.raises(ConfigError, match="no view"):
        get_masked_model(Odd(4, 4)).view()


# ---- gradients --------------------------------------------------------------------------------------------------


def test_gradients_of_inputs_while_masks_are_switched(masked: MaskedModel) -> None:
    """A graph through a loaded mask keeps its weights: others get memory of their own."""
    x = images().requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(masked.view("one")(x)), x)
    loss = loss_of(masked(x))
    for name in ("two", "three"):
        elsewhere(lambda name=name: masked.set_mask(name))
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


def test_memory_is_used_again(masked: MaskedModel) -> None:
    """Fresh memory at every switch would cost more than the switch."""
    masked.set_mask("one")
    before = [slot.buffer.data_ptr() for slot in masked._effective.slots.values()]
    for name in NAMES:
        with torch.no_grad():
            masked(images())
        masked(images())
        masked.set_mask(name)
        assert [slot.buffer.data_ptr() for slot in masked._effective.slots.values()] == before


def test_backwards_in_many_threads() -> None:
    """Threads share the graph of the effective weights; each gradient is right, or refused."""
    masked = masked_digits().eval()
    scores = list(masked.scores.parameters())
    expected = [torch.autograd.grad(loss_of(masked(images(seed))), scores) for seed in range(4)]
    right = []

    def work(number: int) -> None:
        for _ in range(25):
            found: tuple[Tensor, ...] = ()
            refused = pytest.raises(RuntimeError, match="run the forward pass again")
            with suppress(pytest.fail.Exception), refused, torch.enable_grad():
                found = torch.autograd.grad(loss_of(masked(images(number))), scores)
            if found:
                right.append(number)
                for a, b in zip(found, expected[number], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    in_threads(4, work)
    assert len(right) > 10


def test_copies_have_locks_of_their_own(masked: MaskedModel) -> None:
    twins = [copy.deepcopy(masked), pickle.loads(pickle.dumps(masked))]
    with masked.lock, ThreadPoolExecutor(1) as pool:
        for twin in twins:
            pool.submit(twin, images()).result(timeout=60)
