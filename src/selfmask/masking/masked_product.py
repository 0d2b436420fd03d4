"""The product of weights with images of different masks, each weight masked as it is loaded into a register.

No library has it: sparse products lose to dense ones where a few percent of the weights are off, and dense ones would
want the masked weights in memory, which takes longer to write than to use where images are small. Here a bit of the
mask decides whether a weight is loaded as itself or as zero, which costs nothing beside the arithmetic; and weights are
brought from memory once for the images of all masks. Compiled by numba when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from .switching import MOST_GAP

# A step multiplies LANES weights of each of ROWS rows by the inputs of PLACES places of images: as many as there are
# registers for their sums.
_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
LANES, PLACES = (16, 4) if _WIDE else (8, 2)
ROWS = 4

_FLOAT, _LONG = ir.FloatType(), ir.IntType(64)
_STEP = ir.VectorType(_FLOAT, LANES)
_SUMS = ir.VectorType(_FLOAT, LANES * PLACES)


# ---- registers: what numba has no words for ------------------------------------------------------------------------


class _Sums(types.Type):  # type: ignore[misc]
    """Sums of one row: LANES of them for each of PLACES."""

    def __init__(self) -> None:
        super().__init__(name=f"Sums{LANES}x{PLACES}")


@register_model(_Sums)
class _SumsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _SUMS)


def _start(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return cgutils.create_struct_proxy(kind)(context, builder, array).data


def _step_at(builder: Any, start: Any, place: Any) -> Any:
    step = builder.load(builder.bitcast(builder.gep(start, [place]), _STEP.as_pointer()))
    step.align = 4
    return step


def _shuffled(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))


@intrinsic  # type: ignore[untyped-decorator]
def _zeros(_: Any) -> tuple[Any, Callable[..., Any]]:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return ir.Constant(_SUMS, [0.0] * _SUMS.count)

    return _Sums()(), code


@intrinsic  # type: ignore[untyped-decorator]
def _inputs(_: Any, x: Any, starts: Any, offset: Any) -> tuple[Any, Callable[..., Any]]:
    """The inputs of PLACES, from their starts + offset on, side by side."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        own, table = (_start(context, builder, signature.args[each], given[each]) for each in (0, 1))
        parts = []
        for number in range(PLACES):
            place = builder.load(builder.gep(table, [ir.Constant(_LONG, number)]))
            parts.append(_step_at(builder, own, builder.add(place, given[2])))
        while len(parts) > 1:
            both = list(range(2 * parts[0].type.count))
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [_shuffled(builder, one, other, both) for one, other in pairs]
        return parts[0]

    return _Sums()(x, starts, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def _added(_: Any, sums: Any, x: Any, weight: Any, place: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """sums + x * the LANES weights at a place, where the bits at an address are 1."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        step = _step_at(builder, _start(context, builder, signature.args[2], given[2]), given[3])
        flags = builder.load(builder.inttoptr(given[4], ir.IntType(LANES).as_pointer()))
        flags.align = 1
        on = builder.bitcast(flags, ir.VectorType(ir.IntType(1), LANES))
        step = builder.select(on, step, ir.Constant(_STEP, [0.0] * LANES))
        step = _shuffled(builder, step, ir.Constant(_STEP, ir.Undefined), list(range(LANES)) * PLACES)
        fused = ("contract",)
        return builder.fadd(given[0], builder.fmul(step, given[1], flags=fused), flags=fused)

    return sums(sums, sums, weight, types.int64, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def _store_totals(_: Any, sums: Any, out: Any, first: Any) -> tuple[Any, Callable[..., Any]]:
    """The total of each of PLACES, into out[first] and so forth."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        total = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOAT, [_FLOAT, _STEP]), f"llvm.vector.reduce.fadd.v{LANES}f32"
        )
        start = _start(context, builder, signature.args[1], given[1])
        for number in range(PLACES):
            lanes = list(range(LANES * number, LANES * (number + 1)))
            part = _shuffled(builder, given[0], ir.Constant(_SUMS, ir.Undefined), lanes)
            found = builder.call(total, [ir.Constant(_FLOAT, -0.0), part], fastmath=("reassoc",))
            builder.store(found, builder.gep(start, [builder.add(given[2], ir.Constant(_LONG, number))]))
        return context.get_dummy_value()

    return types.void(sums, out, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def _address(_: Any, array: Any) -> tuple[Any, Callable[..., Any]]:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.ptrtoint(_start(context, builder, signature.args[0], given[0]), _LONG)

    return types.int64(array), code


@intrinsic  # type: ignore[untyped-decorator]
def _gap(_: Any, address: Any, number: Any) -> tuple[Any, Callable[..., Any]]:
    """One of the uint16 numbers at an address."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        start = builder.inttoptr(given[0], ir.IntType(16).as_pointer())
        return builder.zext(builder.load(builder.gep(start, [given[1]])), _LONG)

    return types.int64(types.int64, types.int64), code


# ---- the product ---------------------------------------------------------------------------------------------------


@njit(nogil=True)  # type: ignore[untyped-decorator]
def masked_product(
    weight: Any, x: Any, starts: Any, runs: Any, run: int, ends: Any, codes: Any, counts: Any, scales: Any,
    y: Any, outs: Any, first_row: int, last_row: int,
) -> None:  # fmt: skip
    """y[outs[p] + row] = scale of its mask and row * the sum of those weights of the row that are on, times inputs.

    weight: rows of `len(runs) * run` values, one after the other. x: inputs; those of place p are `run` values from
    starts[p] + each of `runs` on. ends: where the places of each mask end; those of the first begin at 0. codes: the
    address of what is on in each mask: bits of all weights, the lowest first, where counts is negative; else `counts`
    gaps between weights that are off, as `OffWeights` has them. Of the rows, those from first_row to last_row, in steps
    of ROWS.
    """
    columns = len(runs) * run
    width = columns // 8  # bytes of a row
    room, totals = np.empty(ROWS * width, np.uint8), np.empty(ROWS * PLACES, np.float32)
    tile = np.empty(PLACES, np.int64)
    at, before = np.zeros(len(codes), np.int64), np.zeros(len(codes), np.int64)  # gaps that were added, and their sum
    for row in range(first_row, last_row, ROWS):
        begin = 0
        for mask in range(len(codes)):
            if counts[mask] < 0:
                bits = codes[mask] + row * width
            else:
                bits, room[:] = _address(room), 255
                while at[mask] < counts[mask]:
                    gap = _gap(codes[mask], at[mask])
                    place = before[mask] + gap - row * columns
                    if place >= ROWS * columns:
                        break
                    if gap < MOST_GAP and place >= 0:  # rows before the first are another thread's
                        room[place >> 3] &= ~(1 << (place & 7)) & 255
                    before[mask] += gap
                    at[mask] += 1
            for first in range(begin, ends[mask], PLACES):
                for number in range(PLACES):  # past the end, the last place is computed again and dropped
                    tile[number] = starts[min(first + number, ends[mask] - 1)]
                a, b, c, d = _zeros(), _zeros(), _zeros(), _zeros()
                here, flags = row * columns, bits
                for offset in runs:
                    for column in range(0, run, LANES):
                        values = _inputs(x, tile, offset + column)
                        a = _added(a, values, weight, here, flags)
                        b = _added(b, values, weight, here + columns, flags + width)
                        c = _added(c, values, weight, here + 2 * columns, flags + 2 * width)
                        d = _added(d, values, weight, here + 3 * columns, flags + 3 * width)
                        here += LANES
                        flags += LANES // 8
                _store_totals(a, totals, 0)
                _store_totals(b, totals, PLACES)
                _store_totals(c, totals, 2 * PLACES)
                _store_totals(d, totals, 3 * PLACES)
                for number in range(min(PLACES, ends[mask] - first)):
                    out = outs[first + number] + row
                    for own in range(ROWS):
                        y[out + own] = totals[own * PLACES + number] * scales[mask, row + own]
            begin = ends[mask]
