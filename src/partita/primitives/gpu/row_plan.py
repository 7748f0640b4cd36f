"""How tensors become rows, and rows become launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.launch import INTERPRETED, NVIDIA, cdiv, next_power_of_2, tl_acc_dtype, zeroed_words

MOST_SPLITS = (
    64  # programs that may wait for one another: far below what any supported GPU keeps resident
)


class RowView(NamedTuple):
    """Tensors of one shape as `[batches, rows, classes]`; `tensors[i]` has the strides `strides[i]`."""

    tensors: tuple[Tensor, ...]
    batches: int
    rows: int
    classes: int
    strides: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=4096)
def _merge(
    dim: int, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[int, int, int, tuple[tuple[int, int, int], ...]] | None:
    dim %= len(shape)
    classes = shape[dim]
    others = [d for d in range(len(shape)) if d != dim]
    count = math.prod(shape[d] for d in others)
    if count * classes == 0:
        return 1, count, classes, ((0, 0, 1),) * len(strides)
    groups: list[list[int]] = []  # of [size, stride in tensor 0, stride in tensor 1, ...]
    for d in others:
        steps = [stride[d] for stride in strides]
        if shape[d] == 1:
            continue
        if groups and all(
            outer == inner * shape[d] for outer, inner in zip(groups[-1][1:], steps, strict=True)
        ):
            groups[-1] = [groups[-1][0] * shape[d], *steps]
        else:
            groups.append([shape[d], *steps])
    if len(groups) > 2:
        return None
    groups = [[1] + [0] * len(strides)] * (2 - len(groups)) + groups
    return (
        groups[0][0],
        groups[1][0],
        classes,
        tuple(
            (groups[0][i + 1], groups[1][i + 1], stride[dim]) for i, stride in enumerate(strides)
        ),
    )


def row_view(dim: int, *tensors: Tensor) -> RowView | None:
    """A view in common, without a copy; None where the dimensions besides `dim` do not merge into two."""
    merged = _merge(dim, tensors[0].shape, tuple([t.stride() for t in tensors]))
    return None if merged is None else RowView(tensors, *merged)


def row_view_or_copy(dim: int, tensor: Tensor) -> RowView:
    """The tensor as rows, through a copy where its strides allow no view."""
    view = row_view(dim, tensor) or row_view(dim, tensor.contiguous())
    assert view is not None
    return view


def with_output(
    run: Callable[[RowView], None], dim: int, *inputs: Tensor, dtype: torch.dtype
) -> Tensor:
    """What `run` writes into the last tensor of a view of the inputs and of a new tensor like the first."""
    output = torch.empty_like(inputs[0], dtype=dtype)
    view = row_view(dim, *inputs, output)
    if view is not None:
        run(view)
        return output
    return output.copy_(with_output(run, dim, *(t.contiguous() for t in inputs), dtype=dtype))


@dataclass(frozen=True)
class RowPlan:
    """How a kernel cuts its rows: `tile` holds whole rows, `row` shares one row among `splits` programs, `loop` reads a row in blocks."""

    kind: str
    rows: int  # rows a program
    block: int  # classes a block
    warps: int
    splits: int = 1
    registers: int | None = None
    vector: int = (
        1  # elements of an aligned access where rows start anywhere; 1 where plain accesses do
    )
    contiguous: bool = True

    def lanes(self, itemsize: int) -> int:
        """Threads among which each row of a block lies, a vector of 16 bytes after the other; 1 where it does not lie so."""
        threads = 32 * self.warps
        one_by_one = (
            self.contiguous
            and (self.rows == 1 or self.warps == 1)
            and self.block * itemsize >= 16 * threads
        )
        return threads if one_by_one else 1

    @property
    def options(self) -> dict[str, Any]:
        limit = (
            {"maxnreg": self.registers}
            if self.registers is not None and NVIDIA and not INTERPRETED
            else {}
        )
        return {"num_warps": self.warps, **limit}


class RowShape(NamedTuple):
    """What a plan depends on."""

    rows: int
    classes: int
    itemsize: int
    contiguous: bool  # the classes of a row lie side by side
    aligned: bool  # rows start on 16 bytes, or so unlike in the tensors that no common vectors serve them
    single: bool  # one batch


def shape_of(view: RowView, held: int = 1) -> RowShape:
    """The shape of a launch whose programs hold the first `held` tensors."""
    sizes = [t.element_size() for t in view.tensors]
    starts = 0
    for t in view.tensors:
        starts |= t.data_ptr()
    return RowShape(
        view.batches * view.rows,
        view.classes,
        max(sizes[:held]),
        *_layout(view.batches, view.classes, view.strides, tuple(sizes), starts % 16 == 0),
    )


@functools.lru_cache(maxsize=4096)
def _layout(
    batches: int,
    classes: int,
    strides: tuple[tuple[int, int, int], ...],
    sizes: tuple[int, ...],
    starts_aligned: bool,
) -> tuple[bool, bool, bool]:
    rows_aligned = all(
        stride[1] * size % 16 == 0 for stride, size in zip(strides, sizes, strict=True)
    )
    in_step = starts_aligned and all(stride == strides[0] for stride in strides)
    contiguous = classes <= 1 or all(stride[2] == 1 for stride in strides)
    return contiguous, batches > 1 or (starts_aligned and rows_aligned) or not in_step, batches == 1


@functools.lru_cache(maxsize=4096)
def row_plan(shape: RowShape, operands: int = 1, patched: bool = False) -> RowPlan:
    """Block sizes for kernels whose programs hold whole rows, or parts of one, of `operands` tensors, and may store one class of them again."""
    block = next_power_of_2(max(shape.classes, 1))
    half = shape.itemsize == 2
    if not shape.contiguous:
        if block <= 512:
            return RowPlan(
                "tile", max(1, min(64, 8192 // block // operands)), block, 4, contiguous=False
            )
        return RowPlan("loop", 64, 64, 4, contiguous=False)
    vector = (
        1
        if shape.aligned or block < (512 if half else 4096) or shape.itemsize > 4
        else 16 // shape.itemsize
    )
    elements = block * operands
    exchange = shape.single and not INTERPRETED
    if elements <= (32768 if shape.itemsize == 4 else 16384) and not (
        patched and exchange and shape.itemsize == 4 and block > 8192
    ):
        if half and block > 8192 and operands == 1 and exchange:
            return RowPlan("row", 1, block, 4, registers=96, vector=vector)
        if vector > 1:
            return RowPlan(
                "row", 1, block, max(1, min(elements // (512 if half else 1024), 16)), vector=vector
            )
        if (
            elements <= 2048
        ):  # 16 fp32 elements a thread, or 32 of a half type, and where that is one warp, no other to wait for
            rows, warps = (
                max(1, (1024 if half else 512) // elements),
                2 if elements > (2048 if half else 512) else 1,
            )
            return RowPlan("tile", rows, block, warps, contiguous=shape.aligned)
        return RowPlan(
            "tile",
            1,
            block,
            max(4, min(elements // (512 if half else 1024), 8 if half else 16)),
            contiguous=shape.aligned,
        )
    edged = (
        vector > 1 and not half
    )  # the edges of an fp32 row cost the registers that would hold 16,384 columns
    wide = 8192 if edged or (operands > 1 and not half) else 16384
    splits = -(-shape.classes // wide)
    if exchange and shape.itemsize <= 4 and splits <= MOST_SPLITS:
        if edged and operands == 1:
            return RowPlan("row", 1, wide, 2, splits, 168, vector)
        return RowPlan("row", 1, wide, 4, splits, 96 if half and operands == 1 else 168, vector)
    return RowPlan("loop", 1, 4096, 4)


@functools.lru_cache(maxsize=4096)
def reduce_plan(shape: RowShape, carried: int = 2) -> RowPlan:
    """Block sizes for kernels that only read and carry so many numbers: several programs take a share of a row each where rows are few."""
    block = next_power_of_2(max(shape.classes, 1))
    if not shape.contiguous:
        return RowPlan("loop", 64, min(block, 64), 4, contiguous=False)
    if block < 4096:
        return RowPlan("loop", max(1, 1024 // block), block, 2)
    splits = 1
    if shape.itemsize <= 4 and shape.rows < 1024:
        splits = max(1, min(-(-2048 // max(shape.rows, 1)), -(-shape.classes // 8192), MOST_SPLITS))
    vector = 1 if shape.aligned or shape.itemsize > 4 else 16 // shape.itemsize
    if shape.itemsize == 2:
        share = shape.classes // splits
        if share <= 8192:
            return RowPlan("loop", 1, 2048, 1, splits, vector=vector)
        if carried > 2:
            return RowPlan("loop", 1, 2048, 2, splits, vector=vector)
        block, warps = (4096, 2) if share <= 16384 else (8192, 4) if share <= 131072 else (4096, 4)
        return RowPlan("loop", 1, block, warps, splits, vector=vector)
    if shape.itemsize == 4 and shape.classes // splits > 32768 and carried <= 2:
        return RowPlan("loop", 1, 8192, 8, splits, vector=vector)
    return RowPlan("loop", 1, 4096 if shape.itemsize == 4 else 2048, 4, splits, vector=vector)


def reduce_plan_for(view: RowView, carried: int = 2) -> RowPlan:
    """The plan of a kernel that reads the view once."""
    return reduce_plan(shape_of(view), carried)


def elementwise_plan(view: RowView) -> RowPlan:
    """Tiles for kernels in which no class waits for another."""
    if view.classes > 1 and any(stride[2] != 1 for stride in view.strides):
        return RowPlan("tile", 64, min(next_power_of_2(max(view.classes, 1)), 64), 4)
    block = min(next_power_of_2(max(view.classes, 1)), 4096)
    return RowPlan("tile", max(1, min(64, 2048 // block)), block, 8 if block >= 4096 else 4)


def reduce_options(chosen: RowPlan, view: RowView) -> dict[str, Any]:
    """Compile-time arguments of the kernels that only read."""
    return {
        "SHARED": chosen.splits > 1,
        "BLOCK_SPLITS": max(2, next_power_of_2(chosen.splits)),
        "VEC": chosen.vector,
        "LANES": chosen.lanes(view.tensors[0].element_size()),
        **tile_options(chosen, view.tensors[0].dtype),
    }


def classes_per_program(view: RowView, chosen: RowPlan) -> int:
    """Classes that each program of a row reads: a multiple of the block."""
    return cdiv(cdiv(view.classes, chosen.splits), chosen.block) * chosen.block


def merge_slots(view: RowView, splits: int, words: int = 1) -> Tensor | None:
    """Zeroed memory for programs of which the last merges: for each row a counter, and a box for each program; none where one has it all."""
    return zeroed_words(
        view.tensors[0].device,
        0 if splits == 1 else words * view.batches * view.rows * (splits + 1),
    )[0]


def row_plan_for(view: RowView, operands: int = 1, patched: bool = False) -> RowPlan:
    """The plan of a kernel that holds the first `operands` tensors of the view."""
    return row_plan(shape_of(view, operands), operands, patched)


def exchange_words(view: RowView, splits: int, words: int = 1) -> int:
    """Zeroed words for programs that share rows: the ticket, then `words` boxes for each of them; none where nothing is shared."""
    return 0 if splits == 1 else 1 + view.rows * view.batches * splits * words


def exchange_slots(view: RowView, splits: int) -> Tensor | None:
    """These words, in an allocation of their own."""
    return zeroed_words(view.tensors[0].device, exchange_words(view, splits))[0]


@functools.lru_cache(maxsize=4096)
def tile_options(chosen: RowPlan, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments of the kernels over tiles and loops."""
    return {
        "ACC_DTYPE": tl_acc_dtype(dtype),
        "ROWS": chosen.rows,
        "BLOCK_V": chosen.block,
        **chosen.options,
    }


def row_options(chosen: RowPlan, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments of the kernels over one row, or a part of one."""
    return {
        "HALF": chosen.registers is not None and dtype.itemsize == 2 and NVIDIA and not INTERPRETED,
        "SHARED": chosen.splits > 1,
        "STREAM": chosen.splits > 1 and chosen.vector == 1,
        "BLOCK_SPLITS": max(2, next_power_of_2(chosen.splits)),
        "VEC": chosen.vector,
        "BLOCK_V": chosen.block,
        **chosen.options,
    }
