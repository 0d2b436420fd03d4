"""The codecs: what goes in comes out, never larger than a bit a weight, never much larger than lzma."""

from __future__ import annotations

import copy
import lzma

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfmask.errors import CorruptMaskFileError
from selfmask.maskfile import codecs, pack_bits

from . import smn

# A warning of numpy on the user's screen is a bug of ours.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
Flags = npt.NDArray[np.bool_]

PATTERNS = ("iid", "channels", "blocks", "magnitude", "runs")
WEIGHTS = ("normal", "zeros", "duplicates", "constant", "all zero", "denormal", "nonfinite", "huge")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def lzma_raw(data: bytes) -> bytes:
    """A shared stream as the specification has it."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 23}]
    return lzma.compress(data, lzma.FORMAT_RAW, filters=filters)


def make_weight(kind: str, n: int, rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """A flat weight tensor, ordinary or odd."""
    w = rng.standard_normal(n)
    if kind == "zeros":
        w[rng.random(n) < 0.5] = 0.0
        w[rng.random(n) < 0.1] = -0.0
    elif kind == "duplicates":
        w = np.round(w)
    elif kind == "constant":
        w = np.full(n, w[0])
    elif kind == "all zero":
        w = np.zeros(n)
    elif kind == "denormal":
        w *= 1e-40
    elif kind == "nonfinite":
        w[rng.random(n) < 0.3] = np.inf
        w[rng.random(n) < 0.1] = -np.inf
        w[rng.random(n) < 0.1] = np.nan
    elif kind == "huge":
        w *= 1e38
    return torch.from_numpy(w).to(dtype)


def make_flags(pattern: str, weight: Tensor, active: float, rng: np.random.Generator) -> Flags:
    """Which weights are on: about the share `active`, exactly none or all at 0 and 1."""
    n = weight.numel()
    share: float | npt.NDArray[np.float64] = active
    if 0 < active < 1:
        spread = min(active, 1 - active)
        if pattern == "channels":
            rows = max(int(n**0.5), 1)
            share = np.resize(np.repeat(active + spread * rng.uniform(-1, 1, rows), rows), n)
        elif pattern == "blocks":
            share = np.resize(np.repeat(rng.random(n // 50 + 1) < active, 50), n).astype(float)
        elif pattern == "runs":
            share = (np.arange(n) < active * n).astype(float)
        elif pattern == "magnitude":
            rank = np.argsort(np.argsort(weight.float().abs().numpy())) / n
            share = 1 - (1 - active) * np.minimum(3 * rank**2, 1 / (1 - active))
    return rng.random(n) < share


def encode(flags: dict[str, Flags], weights: dict[str, Tensor]) -> codecs.Coded:
    packed = {name: pack_bits(torch.from_numpy(on)) for name, on in flags.items()}
    return codecs.encode(packed, {name: on.size for name, on in flags.items()}, weights)


def decode(coded: codecs.Coded, weights: dict[str, Tensor]) -> dict[str, Flags]:
    sizes = {name: weight.numel() for name, weight in weights.items()}
    bits = codecs.decode(coded, sizes, weights)
    return {name: np.unpackbits(packed, count=sizes[name]).astype(bool) for name, packed in bits.items()}


def size(coded: codecs.Coded) -> int:
    return len(coded[1]) + sum(len(payload) for _, payload in coded[0].values())


def check_round_trip(flags: dict[str, Flags], weights: dict[str, Tensor]) -> codecs.Coded:
    coded = encode(flags, weights)
    decoded = decode(coded, weights)
    assert decoded.keys() == flags.keys()
    for name, on in flags.items():
        np.testing.assert_array_equal(decoded[name], on)
    assert size(coded) <= sum(-(-on.size // 8) for on in flags.values()), "more than one bit a weight"
    return coded


# ---- round trips ------------------------------------------------------------------------------------------------

# Small sizes often, where edges lie close together; powers of two and their neighbours for the large ones.
near_powers = st.builds(lambda k, jitter: min(max(2**k + jitter, 1), 2**20), st.integers(0, 17), st.integers(-9, 9))
small_or_near_power = st.one_of(st.integers(1, 300), st.integers(1, 300), near_powers)
shares = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.01, 0.99]), st.floats(0, 1))


@st.composite
def tensors(draw: st.DrawFn, sizes: st.SearchStrategy[int] = small_or_near_power) -> tuple[Flags, Tensor]:
    """One tensor and its mask; hypothesis draws what kind, numpy fills it in."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weight = make_weight(draw(st.sampled_from(WEIGHTS)), draw(sizes), rng, draw(st.sampled_from(DTYPES)))
    return make_flags(draw(st.sampled_from(PATTERNS)), weight, draw(shares), rng), weight


@given(tensors())
@example((np.array([True]), torch.ones(1)))
@example((np.array([False]), torch.full((1,), float("nan"))))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_goes_in_comes_out(tensor: tuple[Flags, Tensor]) -> None:
    flags, weight = tensor
    check_round_trip({"w": flags}, {"w": weight})


@given(st.lists(tensors(), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_several_tensors_at_once(several: list[tuple[Flags, Tensor]]) -> None:
    names = [f"layer{i}.weight" for i in range(len(several))]
    flags = {name: on for name, (on, _) in zip(names, several, strict=True)}
    check_round_trip(flags, {name: weight for name, (_, weight) in zip(names, several, strict=True)})


@given(tensors(st.integers(2**19, 2**20)))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_large_tensors(tensor: tuple[Flags, Tensor]) -> None:
    flags, weight = tensor
    check_round_trip({"w": flags}, {"w": weight})


@pytest.mark.parametrize("n", [1, 7, 8, 9, 2**17 - 1, 2**17, 2**17 + 1, 2**20 - 1, 2**20, 2**20 + 1])
@pytest.mark.parametrize("active", [0.0, 1.0, 0.97])
def test_edges_of_size_and_activity(n: int, active: float) -> None:
    """All off and all on are legal masks, and sizes around the limits of bytes, blocks and 2^20 work."""
    rng = np.random.default_rng(n)
    weight = make_weight("normal", n, rng)
    coded = check_round_trip({"w": make_flags("magnitude", weight, active, rng)}, {"w": weight})
    if active in (0, 1):
        assert size(coded) <= 8, "a mask of one value costs next to nothing"


def test_a_single_odd_bit_anywhere() -> None:
    """One weight off among many, or one on: first, last and around inner limits."""
    n = 2**17 + 77
    weight = make_weight("normal", n, np.random.default_rng(1))
    for position in (0, 1, 7, 8, n // 2, 2**17 - 1, 2**17, n - 1):
        for on in (True, False):
            flags = np.full(n, not on)
            flags[position] = on
            assert size(check_round_trip({"w": flags}, {"w": weight})) <= 24


def test_tensors_of_no_bits_beside_others() -> None:
    """A small `fraction` can leave a tensor without any weight to mask."""
    flags = {"a": np.zeros(0, bool), "b": np.ones(100, bool), "c": np.zeros(0, bool)}
    check_round_trip(flags, {"a": torch.empty(0), "b": torch.ones(100), "c": torch.empty(0)})
    check_round_trip({"a": flags["a"]}, {"a": torch.empty(0)})


def test_decoded_bits_can_be_written_to() -> None:
    """Callers own what they get: no view of a file that goes away."""
    rng = np.random.default_rng(0)
    weights = {name: make_weight("normal", 4000, rng) for name in "abc"}
    patterns = {"a": ("iid", 0.5), "b": ("iid", 0.97), "c": ("runs", 0.5)}
    flags = {name: make_flags(kind, weights[name], share, rng) for name, (kind, share) in patterns.items()}
    coded = encode(flags, weights)
    assert {codec for codec, _ in coded[0].values()} >= {codecs.RAW, codecs.RICE}
    for bits in codecs.decode(coded, dict.fromkeys("abc", 4000), weights).values():
        bits[:] = 0


# ---- sizes ------------------------------------------------------------------------------------------------------


def pattern_of_a_million(name: str, rng: np.random.Generator) -> Flags:
    n = 2**20
    if name.startswith("iid"):
        return rng.random(n) >= float(name.removeprefix("iid "))
    if name == "channels":  # every channel has its own share, from none to a third
        return rng.random(n) >= np.repeat(rng.beta(0.5, 4, 1024), 1024)
    if name == "blocks":
        return np.kron(rng.random((64, 64)) >= 0.1, np.ones((16, 16))).astype(bool).flatten()
    return np.repeat(rng.random(2048) >= 0.3, 512)  # rows


@pytest.mark.parametrize("split", [1, 7])
@pytest.mark.parametrize("pattern", ["iid 0.01", "iid 0.1", "iid 0.5", "iid 0.99", "channels", "blocks", "rows"])
def test_never_much_larger_than_lzma(pattern: str, split: int) -> None:
    """The issue allows 1.02 times lzma of the packed bits, on any pattern; also over several tensors."""
    rng = np.random.default_rng(3)
    flags = {str(i): part for i, part in enumerate(np.array_split(pattern_of_a_million(pattern, rng), split))}
    weights = {name: make_weight("normal", part.size, rng) for name, part in flags.items()}
    limit = len(lzma.compress(b"".join(np.packbits(part).tobytes() for part in flags.values())))
    assert size(check_round_trip(flags, weights)) <= 1.02 * limit + 32


def entropy(share: npt.ArrayLike) -> npt.NDArray[np.float64]:
    p = np.clip(share, 1e-12, 1 - 1e-12)
    return np.asarray(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_weights_that_flip_first_are_cheap(dtype: torch.dtype) -> None:
    """What the codec is for: a mask that depends on |w| costs clearly less than its entropy without the weights."""
    rng = np.random.default_rng(5)
    weight = make_weight("normal", 2**18, rng, dtype)
    magnitude = weight.float().abs().numpy()
    p = 0.3 / (1 + np.exp(-6 * (magnitude - 2)))
    flags = rng.random(2**18) >= p
    blind = float(entropy(1 - flags.mean())) * flags.size / 8
    informed = float(entropy(p).sum()) / 8
    coded = size(check_round_trip({"w": flags}, {"w": weight}))
    assert informed < 0.75 * blind, "the pattern of this test is not what it says"
    assert coded < 0.85 * blind
    assert coded < 1.12 * informed


@pytest.mark.parametrize("share", [0.002, 0.02, 0.1])
def test_an_unpredictable_mask_costs_its_entropy(share: float) -> None:
    rng = np.random.default_rng(6)
    flags = rng.random(2**18) >= share
    coded = size(check_round_trip({"w": flags}, {"w": make_weight("normal", flags.size, rng)}))
    assert coded < 1.05 * float(entropy(1 - flags.mean())) * flags.size / 8 + 32


# ---- the oracle -------------------------------------------------------------------------------------------------


def magnitudes(weights: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: weight.float().abs().tolist() for name, weight in weights.items()}


def check_oracle(flags: dict[str, Flags], weights: dict[str, Tensor]) -> codecs.Coded:
    coded = encode(flags, weights)
    bits = smn.decode(*coded, magnitudes(weights))
    assert bits == {name: on.astype(int).tolist() for name, on in flags.items()}
    return coded


@given(st.lists(tensors(st.integers(1, 700)), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_naive_decoder_reads_the_same(several: list[tuple[Flags, Tensor]]) -> None:
    """`smn.py` decodes symbol by symbol, from the specification."""
    flags = {str(i): on for i, (on, _) in enumerate(several)}
    check_oracle(flags, {str(i): weight for i, (_, weight) in enumerate(several)})


def test_the_naive_decoder_meets_every_kind_of_rice_code() -> None:
    """No to three class borders, either symbol rare, and more weights than one block of the fast decoder."""
    rng = np.random.default_rng(8)
    seen = set()
    for n in (2000, 2**17 + 1000):
        for borders in range(4):
            level = rng.integers(borders + 1, size=n)
            weight = torch.from_numpy(np.float32(2.0) ** level * rng.choice([-1, 1], n).astype(np.float32))
            rare = rng.random(n) < np.array([0.001, 0.02, 0.1, 0.4])[level]
            for flags in (rare, ~rare):
                codec, payload = check_oracle({"w": flags}, {"w": weight})[0]["w"]
                assert codec == codecs.RICE
                seen.add((payload[0] & 0x7F, payload[0] >> 7))
    assert seen == {(borders, symbol) for borders in range(4) for symbol in (0, 1)}


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "payload", "shared"),
    [
        ("raw", b"", b""),
        ("raw", bytes(12), b""),
        ("raw", bytes(14), b""),
        ("raw", bytes(12) + b"\x01", b""),  # a bit beyond the hundredth
        ("rice", b"", b""),
        ("rice", b"\x03" + bytes(20), b""),  # three borders
        ("rice", b"\x7f" + bytes(300), b""),
        ("rice", b"\x01\x80\x7f" + bytes(4), b""),  # a border of infinity
        ("rice", b"\x01\xc0\x7f" + bytes(4), b""),  # a border of NaN
        ("rice", b"\x02\x00\x3f\x00\x3f" + bytes(6), b""),  # two equal borders
        ("rice", b"\x02\x80\x7f\x80\x7f" + bytes(6), b""),  # two infinite borders
        ("rice", b"\x00\x1f\x00", b""),  # k = 31
        ("rice", b"\x00\x00\x65", b""),  # 101 rare among 100
        ("rice", b"\x00\x00\xff\xff\xff\xff\xff\x01", b""),  # a number that does not end
        ("rice", b"\x00\x00\x01", b""),  # one code announced, none there
        ("rice", b"\x00\x00\x00\x00", b""),  # a byte too many
        ("rice", b"\x00\x00\x01" + bytes(12) + b"\x08", b""),  # the position 100
        ("rice", b"\x00\x1e\x01" + b"\x80" * 31, b""),  # a position of 2^30
        ("rice", b"\x01\x00\x42\x00\x01\x00\x00\x80", b""),  # a position in an empty class
        ("rice", b"\x00\x00\x00", b"x"),  # a shared stream that nobody uses
        ("lzma", b"", b""),
        ("lzma", b"", b"garbage"),
        ("lzma", b"", lzma_raw(bytes(12))),
        ("lzma", b"", lzma_raw(bytes(14))),
        ("lzma", b"", lzma_raw(bytes(13)) + b"\0"),
        ("lzma", b"", lzma_raw(bytes(13))[:-1]),
        ("lzma", b"", lzma_raw(bytes(12) + b"\x01")),
        ("lzma", b"x", lzma_raw(bytes(13))),
    ],
)
def test_what_encode_would_not_write_is_refused(codec: str, payload: bytes, shared: bytes) -> None:
    """A typed error, from the oracle too: both read the same specification."""
    weights = {"w": torch.linspace(-1, 1, 100)}
    with pytest.raises(CorruptMaskFileError):
        codecs.decode(({"w": (codec, payload)}, shared), {"w": 100}, weights)
    with pytest.raises(smn.InvalidError):
        smn.decode({"w": (codec, payload)}, shared, magnitudes(weights))


def test_what_masks_of_a_base_have_in_common_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = codecs._class_members

    def counted(weight: Tensor, borders: codecs.Borders) -> list[codecs.Positions]:
        searches.append(borders.size)
        return search(weight, borders)

    monkeypatch.setattr(codecs, "_class_members", counted)
    weight = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    on = np.ones(20_000, bool)
    on[weight.abs().numpy() > 1.5] = np.random.default_rng(0).random(int((weight.abs() > 1.5).sum())) > 0.4
    packed = {"w": np.packbits(on)}
    coded = codecs.encode(packed, {"w": on.size}, {"w": weight})
    assert coded[0]["w"][0] == codecs.RICE
    members = codecs.Members()
    searches.clear()
    for key, times in (("a", 1), ("a", 1), ("b", 2), (None, 3), (None, 4)):  # so often has been searched by then
        known = {} if key is None else {"w": key}
        found = codecs.decode(coded, {"w": on.size}, {"w": weight}, members, known)
        assert np.array_equal(found["w"], packed["w"])
        assert len(searches) == times
    copied = copy.deepcopy(members)
    codecs.decode(coded, {"w": on.size}, {"w": weight}, copied, {"w": "a"})
    assert len(searches) == 5
    tight = codecs.Members(room=1)  # too small for anything: slower, and as right
    for _ in range(2):
        found = codecs.decode(coded, {"w": on.size}, {"w": weight}, tight, {"w": "a"})
        assert np.array_equal(found["w"], packed["w"])
    assert not tight._kept


def test_masks_with_other_borders_find_other_members() -> None:
    weight = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    size, chance, members = weight.abs().numpy(), np.random.default_rng(0), codecs.Members()
    payloads = set()
    for border in (1.0, 2.0, 1.0):
        on = ~((size > border) & (chance.random(size.size) < 0.4))
        coded = codecs.encode({"w": np.packbits(on)}, {"w": on.size}, {"w": weight})
        payloads.add(coded[0]["w"][1][:7])  # the number of borders, and the borders
        found = codecs.decode(coded, {"w": on.size}, {"w": weight}, members, {"w": "a"})
        assert np.array_equal(found["w"], np.packbits(on))
    assert len(payloads) > 1
