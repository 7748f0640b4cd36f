"""Views of tensors as rows, and plans of launches over rows.

`row_view` merges all dimensions but one, so that a kernel sees `[batches, rows, classes]`. The
plans (`row_plan`, `reduce_plan`) choose block sizes for such a view, and the `*_options` functions
turn a plan into the constexpr arguments of a kernel. `launch_reduction` and `launch_elementwise`
launch kernels that only read rows, and those in which no class depends on another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.caches import register_cache
from ...runtime.dtypes import acc_dtype
from ...runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype, zeroed_words
from .target import MAX_SPLITS, Target, target_of

SEGMENT = 16384  # classes of a row, about, that lanes add up before they add them to the row
MAX_SEGMENTS = 32  # of a row
# So many programs, about, share fewer rows than that. More rows have a program each.
SHARING_PROGRAMS, FEW_ROWS = 2048, 512

Strides = tuple[int, int, int]  # over batches, rows and classes


class StridedRows(NamedTuple):
    """A number for each class of each row, `[batches, rows, classes]`, with its three strides."""

    ptr: Any
    batch: Any
    row: Any
    column: Any


def matrix_rows(matrix: Tensor) -> StridedRows:
    """Return a matrix as one batch of rows."""
    return StridedRows(matrix, 0, *matrix.stride())


class RowNumbers(NamedTuple):
    """One number for each row, `step` apart, or None: 0 if all rows share one number."""

    ptr: Any
    step: Any


class Segments(NamedTuple):
    """The segments of the classes of a row, and the programs that have them.

    Fields:
        size: the classes of a segment, a multiple of a block.
        number: the segments of a row.
        share: the segments of a program.
        programs: the programs that share a row.
        counters: zeroed int64 words, one for each row that programs share, or None.
        slots: memory for the statistics of the lanes over each segment of these rows, or None.
    """

    size: int
    number: int
    share: int
    programs: int
    counters: Tensor | None
    slots: Tensor | None


class RowView(NamedTuple):
    """Tensors of one shape as `[batches, rows, classes]`.

    Fields:
        tensors: the tensors, in any shape with these elements.
        batches: the size of the outer dimension that the rows are merged into.
        rows: the number of rows in a batch.
        classes: the number of elements in a row.
        strides: the strides of each tensor over batches, rows and classes.
    """

    tensors: tuple[Tensor, ...]
    batches: int
    rows: int
    classes: int
    strides: tuple[Strides, ...]

    @property
    def strided(self) -> tuple[StridedRows, ...]:
        """The tensors with their strides, as kernels take them."""
        return tuple(StridedRows(t, *s) for t, s in zip(self.tensors, self.strides, strict=True))


@functools.lru_cache(maxsize=4096)
def _merge(
    dim: int, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[int, int, int, tuple[Strides, ...]] | None:
    """Return the fields of a `RowView`, or None if the other dimensions do not merge into two."""
    dim %= len(shape)
    classes = shape[dim]
    others = [d for d in range(len(shape)) if d != dim]
    rows = math.prod(shape[d] for d in others)
    if rows * classes == 0:
        return 1, rows, classes, ((0, 0, 1),) * len(strides)
    groups: list[list[int]] = []  # each is [size, stride in tensor 0, stride in tensor 1, ...]
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
    padding = [[1] + [0] * len(strides)] * (2 - len(groups))
    batch_group, row_group = padding + groups
    merged = tuple(
        (batch_group[i + 1], row_group[i + 1], stride[dim]) for i, stride in enumerate(strides)
    )
    return batch_group[0], row_group[0], classes, merged


def row_view(dim: int, *tensors: Tensor) -> RowView | None:
    """Return a common view of the tensors without a copy.

    It is None if the dimensions other than `dim` do not merge into two.
    """
    merged = _merge(dim, tensors[0].shape, tuple([t.stride() for t in tensors]))
    return None if merged is None else RowView(tensors, *merged)


def row_view_or_copy(dim: int, tensor: Tensor) -> RowView:
    """Return the tensor as rows, through a copy if its strides allow no view."""
    view = row_view(dim, tensor) or row_view(dim, tensor.contiguous())
    assert view is not None
    return view


def flat_rows(tensor: Tensor | None) -> RowNumbers:
    """Return the numbers of a tensor with one number for each row.

    The gradient of a sum has one number for all rows, so the step is 0. It is 1 for a tensor that
    is contiguous, or whose strides allow no constant step and which is therefore copied. None
    stays None.
    """
    if tensor is None:
        return RowNumbers(None, 1)
    if tensor.numel() > 1:
        if tensor.ndim == 1:
            return RowNumbers(tensor, tensor.stride(0))
        if not any(tensor.stride()):
            return RowNumbers(tensor, 0)
    return RowNumbers(tensor.contiguous(), 1)


def with_output(
    run: Callable[[RowView], None], dim: int, *inputs: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return what `run` writes into a new tensor like the first input.

    `run` gets a view of the inputs with the output as its last tensor.
    """
    output = torch.empty_like(inputs[0], dtype=dtype)
    view = row_view(dim, *inputs, output)
    if view is not None:
        run(view)
        return output
    return output.copy_(with_output(run, dim, *(t.contiguous() for t in inputs), dtype=dtype))


@dataclass(frozen=True)
class RowPlan:
    """The division of a kernel's rows into programs and blocks.

    Fields:
        kind: `tile`: a program holds whole rows; `row`: `splits` programs share one row, and each
            holds its part; `loop`: a program reads its rows in blocks.
        rows: the rows of a program.
        block: the classes of a block.
        num_warps: the warps of a program.
        splits: the programs that share a row.
        max_registers: the registers a thread may use, or None for no limit.
        vector: the elements of an aligned access if rows start at any address; 1 if plain accesses
            are aligned.
        contiguous: whether the classes of a row are adjacent, and plain accesses are aligned.
        partials: the partial sums in which kernels add up a block; see `math.row_sum`.
    """

    kind: str
    rows: int
    block: int
    num_warps: int
    splits: int = 1
    max_registers: int | None = None
    vector: int = 1
    contiguous: bool = True
    partials: int = 0

    def lanes(self, itemsize: int) -> int:
        """Return the number of threads over which each row of a block is distributed.

        The threads then hold successive vectors of 16 bytes. The number is 1 if a block is not
        distributed in this way.
        """
        threads = 32 * self.num_warps
        distributed = (
            self.contiguous
            and (self.rows == 1 or self.num_warps == 1)
            and self.block * itemsize >= 16 * threads
        )
        return threads if distributed else 1

    def with_partials(self, itemsize: int, target: Target) -> RowPlan:
        """Return the plan with the partial sums of threads that load vectors of a row."""
        lanes = target.warp_size * self.num_warps * 16 // itemsize
        if not self.contiguous:  # Vectors lie across rows.
            lanes = max(1, lanes // self.rows)
        return replace(self, partials=min(self.block, lanes))

    def part(self, classes: int) -> int:
        """Return the classes of a part of a row but for the last: a multiple of any vector."""
        return cdiv(cdiv(classes, self.splits), 16) * 16

    def for_any_start(self, shape: RowShape) -> RowPlan:
        """Return the plan of kind `row`, with vectors, for rows that start between vectors."""
        if shape.aligned:
            return self
        return replace(self, kind="row", rows=1, vector=16 // shape.itemsize)

    def compiled_for(self, target: Target) -> RowPlan:
        """Return the plan without a limit of registers where the compiler takes none."""
        return self if target.runs_ptx else replace(self, max_registers=None)

    @property
    def options(self) -> dict[str, Any]:
        """The launch options."""
        limit = self.max_registers
        return {"num_warps": self.num_warps, **({} if limit is None else {"maxnreg": limit})}


class RowShape(NamedTuple):
    """The properties of a view that a plan depends on.

    Fields:
        rows: the number of rows in all batches.
        classes: the number of classes.
        itemsize: the largest element size of the operands, in bytes.
        contiguous: whether the classes of a row are adjacent.
        aligned: whether plain accesses serve: the rows start on 16 bytes, or the tensors differ so
            much that no common vectors serve them.
    """

    rows: int
    classes: int
    itemsize: int
    contiguous: bool
    aligned: bool


def shape_of(view: RowView, operands: int = 1) -> RowShape:
    """Return the shape of a launch whose programs hold the first `operands` tensors."""
    sizes, strides = [t.element_size() for t in view.tensors], view.strides
    rows_are_aligned = not any(
        stride[1] * size % 16 for stride, size in zip(strides, sizes, strict=True)
    )
    # Common vectors serve tensors that start on 16 bytes and have the same strides.
    has_vectors = strides.count(strides[0]) == len(strides) and not any(
        t.data_ptr() % 16 for t in view.tensors
    )
    return RowShape(
        rows=view.batches * view.rows,
        classes=view.classes,
        itemsize=max(sizes[:operands]),
        contiguous=view.classes <= 1 or all(stride[2] == 1 for stride in strides),
        aligned=view.batches > 1 or rows_are_aligned or not has_vectors,
    )


@functools.lru_cache(maxsize=4096)
def row_plan(shape: RowShape, target: Target, operands: int = 1, patched: bool = False) -> RowPlan:
    """Return the plan of a kernel whose programs hold whole rows, or parts of one row.

    The order of sums follows from block, splits and partials, and these from width and dtype.

    Args:
        shape: the shape of the launch.
        target: the GPU.
        operands: the number of tensors that a program holds.
        patched: whether the kernel stores one class of each row a second time.
    """
    plan = _aligned_plan(shape, target, operands, patched).with_partials(shape.itemsize, target)
    if plan.kind == "loop" or not plan.contiguous or shape.itemsize > 4:
        return plan
    # Threads load and store few numbers one by one in the same time.
    return (
        plan.for_any_start(shape) if plan.block >= (512 if shape.itemsize == 2 else 4096) else plan
    )


def _aligned_plan(shape: RowShape, target: Target, operands: int, patched: bool) -> RowPlan:
    """Return the plan of rows that start on 16 bytes."""
    block = next_power_of_2(max(shape.classes, 1))
    is_half = shape.itemsize == 2
    if not shape.contiguous:
        if block <= 512:
            rows = max(1, min(64, 8192 // block // operands))
            return RowPlan("tile", rows, block, 4, contiguous=False)
        return RowPlan("loop", 64, 64, 4, contiguous=False)
    can_exchange = not target.interpreted
    elements = block * operands
    fits = elements <= (32768 if shape.itemsize == 4 else 16384)
    # Programs share fp32 rows of more than 8,192 classes if they are patched.
    if fits and not (patched and can_exchange and shape.itemsize == 4 and block > 8192):
        if is_half and block > 8192 and operands == 1 and can_exchange:
            return RowPlan("row", 1, block, 4, max_registers=96)
        return _whole_row_plan(shape, block, operands, patched)
    if is_half and block == 32768 and operands <= 2 and can_exchange:
        # A program that holds the whole row waits for no other.
        return RowPlan("row", 1, block, 8 * operands, max_registers=128)
    part, num_warps = 16384, 4
    splits = cdiv(shape.classes, 8192)
    if operands > 1 and not is_half:
        part = 8192
    elif splits % 2 and splits <= MAX_SPLITS and (patched or not is_half):
        part, num_warps = 8192, 2  # Half of the last block would be empty.
    splits = cdiv(shape.classes, part)
    if can_exchange and shape.itemsize <= 4 and splits <= MAX_SPLITS:
        max_registers = 96 if is_half and operands == 1 else 168
        return RowPlan("row", 1, part, num_warps, splits, max_registers)
    return RowPlan("loop", 1, 4096, 4)


def _whole_row_plan(shape: RowShape, block: int, operands: int, patched: bool) -> RowPlan:
    """Return the plan of a kernel whose programs hold whole contiguous rows, `operands` of each."""
    is_half, elements, rows = shape.itemsize == 2, block * operands, 1
    if elements <= 2048:
        # A thread holds 16 fp32 elements, or 32 of a half type. If that is one warp, it waits for
        # no other.
        rows = max(1, (1024 if is_half else 512) // elements)
        num_warps = 2 if elements > (2048 if is_half else 512) else 1
    else:
        num_warps = max(4, min(elements // 1024, 8 if is_half else 16))
    # Half as many warps suffice for a row that leaves much of its block empty. They wait less.
    most = 7 if shape.itemsize == 4 or block == 2048 else 5
    if (
        (operands == 1 or is_half)
        and not patched
        and 2048 <= block <= 8192
        and 8 * shape.classes <= most * block
    ):
        num_warps = elements // 2048
    # There is no kernel of kind `row` for fp64.
    return RowPlan("row" if rows == 1 and shape.itemsize <= 4 else "tile", rows, block, num_warps)


class LaneTile(NamedTuple):
    """How a kernel takes the classes of rows that it only reads. All but `access` fixes their bits.

    Fields:
        rows: the rows of a program.
        block: the classes of a block.
        lanes: the threads to which a row of a block is dealt.
        vector: the successive classes that a lane gets at a time.
        access: how a vector is loaded: 2 at once, as all vectors start on a multiple of their size;
            1 in parts, wherever it starts; 0 as the compiler chooses.
        num_warps: the warps of a program.
        has_segments: whether a row may have several segments.
    """

    rows: int
    block: int
    lanes: int
    vector: int
    access: int
    num_warps: int
    has_segments: bool = False


def vector_classes(classes: int, itemsize: int) -> int:
    """Return the successive classes of a lane: those of 16 bytes, if rows consist of such vectors.

    Others start anywhere. Their lanes get 4 or 8 bytes, so that a load reads adjacent memory.
    """
    return max(1, 4 // itemsize) if classes * itemsize % 16 else 16 // itemsize


def row_access(vector: int, *rows: StridedRows) -> int:
    """Return the `access` of a `LaneTile` to rows that are read in the same way."""
    if not target_of(rows[0].ptr.device).runs_ptx or any(x.column != 1 for x in rows):
        return 0
    for x in rows:
        itemsize = x.ptr.element_size()
        if itemsize * vector < 4:  # single 16-bit numbers, beside wider ones of another tensor
            return 0
        if (x.ptr.data_ptr() | itemsize * (x.batch | x.row)) % (itemsize * vector):
            return 1
    return 2


def segment_size(classes: int, block: int) -> int:
    """Return the classes of a segment of a row."""
    # Rows of few segments have smaller ones, which more programs share if there are few rows.
    least = SEGMENT // 2 if SEGMENT < classes <= 2 * SEGMENT else SEGMENT
    segments = max(1, min(cdiv(classes, least), MAX_SEGMENTS))
    return cdiv(cdiv(max(classes, 1), segments), block) * block


def segments_of(tile: LaneTile, x: StridedRows, rows: int, classes: int, words: int) -> Segments:
    """Return the segments of rows, with memory for as many words of each lane.

    If there are few rows, several programs share the segments of each.
    """
    size, counters, slots = segment_size(classes, tile.block), None, None
    number = max(1, cdiv(classes, size)) if tile.has_segments else 1
    share = cdiv(number, cdiv(SHARING_PROGRAMS, max(rows, 1)) if rows < FEW_ROWS else 1)
    programs = cdiv(number, share)
    if programs > 1:
        device, dtype = x.ptr.device, acc_dtype(x.ptr.dtype)
        counters = zeroed_words(device, rows)[0]
        slots = torch.empty(rows * number * words * tile.lanes, dtype=dtype, device=device)
    return Segments(size, number, share, programs, counters, slots)


@functools.lru_cache(maxsize=4096)
def _lane_tile(classes: int, largest: int, num_warps: int, vector: int, access: int) -> LaneTile:
    """Return the tile of one row, and of blocks of at most `largest` classes for `num_warps`."""
    block = max(min(next_power_of_2(classes), largest), vector)
    num_warps = max(num_warps * block // largest, 1)
    lanes = min(32 * num_warps, block // vector)
    return LaneTile(1, block, lanes, vector, access, num_warps, classes > SEGMENT)


def lane_tile(classes: int, largest: int, num_warps: int, *rows: StridedRows) -> LaneTile:
    """Return the tile of a kernel whose programs read a row of each tensor.

    Args:
        classes: the classes of a row.
        largest: the classes of a block of long rows.
        num_warps: the warps for such a block; smaller blocks have fewer.
        rows: the tensors.
    """
    vector = min(vector_classes(classes, x.ptr.element_size()) for x in rows)
    return _lane_tile(classes, largest, num_warps, vector, row_access(vector, *rows))


@functools.lru_cache(maxsize=4096)
def reduce_plan(
    classes: int, itemsize: int, access: int, contiguous: bool, carried: int = 2
) -> LaneTile:
    """Return the tile of a kernel that only reads, and carries `carried` numbers between blocks.

    It does not depend on the number of rows, so the bits of a row do not.
    """
    block, vector = next_power_of_2(max(classes, 1)), vector_classes(classes, itemsize)
    if not contiguous:
        block = min(block, 64)
        return LaneTile(64, block, 1, 1, 0, 4)
    if block < 4096:
        block = max(block, vector)
        rows = max(1, min(64, 1024 // block))
        return LaneTile(rows, block, min(64 // rows, block // vector), vector, access, 2)
    if vector * itemsize < 16 and (itemsize == 2 or carried > 2):
        block, num_warps = 4096 if carried <= 2 else 2048, 4
    elif itemsize == 2 and classes > 8192 and carried > 2:
        block, num_warps = 2048, 2
    elif itemsize == 2:
        num_warps = 1 if classes <= 8192 else 2 if classes <= 16384 else 4
        block = 2048 * num_warps if classes <= 131072 else 4096
    elif itemsize == 4 and classes > 32768 and carried <= 2:
        block, num_warps = 8192, 8
    else:
        block, num_warps = 4096 if itemsize == 4 else 2048, 4
    return _lane_tile(classes, block, num_warps, vector, access)


def row_plan_for(view: RowView, operands: int = 1, patched: bool = False) -> RowPlan:
    """Return the plan of a kernel that holds the first `operands` tensors of the view."""
    target = target_of(view.tensors[0].device)
    plan = row_plan(shape_of(view, operands), target, operands, patched)
    return plan.compiled_for(target)


def launch_elementwise(kernel: Any, view: RowView, **arguments: Any) -> None:
    """Launch a kernel in which no class depends on another; it has a tile of rows and classes."""
    block = next_power_of_2(max(view.classes, 1))
    if view.classes > 1 and any(stride[2] != 1 for stride in view.strides):
        plan = RowPlan("tile", 64, min(block, 64), 4)
    else:
        block = min(block, 4096)
        rows, num_warps = max(1, min(64, 2048 // block)), 8 if block >= 4096 else 4
        plan = RowPlan("tile", rows, block, num_warps)
    launch(
        kernel,
        view.batches * cdiv(view.rows, plan.rows) * cdiv(view.classes, plan.block),
        rows=view.rows,
        **arguments,
        **tile_options(plan, view.tensors[0].dtype),
    )


def launch_reduction(
    kernel: Any,
    view: RowView,
    carried: int = 2,
    max_registers: int | None = None,
    **arguments: Any,
) -> None:
    """Launch a kernel that only reads, and carries `carried` numbers from block to block.

    `max_registers` limits those of a thread where wide rows start on 16 bytes.
    """
    options: dict[str, Any] = {}
    tensor, rows, classes = view.tensors[0], view.batches * view.rows, view.classes
    contiguous = classes <= 1 or all(stride[2] == 1 for stride in view.strides)
    itemsize = tensor.element_size()
    access = row_access(vector_classes(classes, itemsize), view.strided[0])
    tile = reduce_plan(classes, itemsize, access, contiguous, carried)
    segments = segments_of(tile, view.strided[0], rows, classes, 6)
    if tile.has_segments and access and segments.slots is None and itemsize <= 4:
        options["maxnreg"] = max_registers
    launch(
        kernel,
        view.batches * cdiv(view.rows, tile.rows) * segments.programs,
        segments=segments,
        rows=view.rows,
        TILE=tile,
        ACC_DTYPE=tl_acc_dtype(tensor.dtype),
        num_warps=tile.num_warps,
        **options,
        **arguments,
    )


def vector_width(*rows: Tensor) -> int:
    """Return how many classes of rows `[M, C]` a thread loads at once: those of 16 bytes, or one.

    Threads load whole vectors if all rows start on 16 bytes, and consist of whole vectors or are
    padded to 16 columns.
    """
    classes = rows[0].shape[1]
    vector = 16 // max(tensor.element_size() for tensor in rows)
    for tensor in rows:
        is_aligned = tensor.stride(0) % vector == 0 and tensor.data_ptr() % 16 == 0
        is_whole = classes % vector == 0 or tensor.stride(0) == cdiv(classes, 16) * 16
        if tensor.stride(1) != 1 or not (is_aligned and is_whole):
            return 1
    return vector


def stored_tile(largest: int, num_warps: int, *rows: Tensor) -> LaneTile:
    """Return the tile of a kernel that adds nothing up, and stores rows `[M, C]`.

    Its threads have `vector_width` classes in succession.
    """
    vector = vector_width(*rows)
    access = row_access(vector, *map(matrix_rows, rows)) if vector > 1 else 0
    return _lane_tile(rows[0].shape[1], largest, num_warps, vector, access)


def exchange_words(view: RowView, splits: int, words: int = 1) -> int:
    """Return the number of zeroed words with which programs that share rows exchange numbers.

    They are the counter from which programs take their index, and `words` slots for each program.
    No words are needed if no row is shared.
    """
    return 0 if splits == 1 else 1 + view.rows * view.batches * splits * words


def exchange_slots(view: RowView, splits: int) -> Tensor | None:
    """Return the words of `exchange_words` in a new tensor, or None if no row is shared."""
    return zeroed_words(view.tensors[0].device, exchange_words(view, splits))[0]


def tile_options(plan: RowPlan, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constexpr arguments of kernels with a plan of kind `tile` or `loop`."""
    return {
        "ACC_DTYPE": tl_acc_dtype(dtype),
        "ROWS": plan.rows,
        "BLOCK_V": plan.block,
        **plan.options,
    }


def row_options(plan: RowPlan, classes: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constexpr arguments of kernels with a plan of kind `row`."""
    size = plan.part(classes)
    return {
        "HALF": plan.max_registers is not None and dtype.itemsize == 2,
        "BLOCK_SPLITS": next_power_of_2(plan.splits),
        "LANES": plan.partials,
        "SLICES": max(1, cdiv(min(size, classes) + plan.vector - 1, plan.partials)),
        "FULL": max(0, classes - (plan.splits - 1) * size) // plan.partials,
        "VEC": plan.vector,
        **plan.options,
    }


register_cache("primitives.row_plan.merged_dims", _merge.cache_clear)
register_cache("primitives.row_plan.row_plans", row_plan.cache_clear)
register_cache("primitives.row_plan.lane_tiles", _lane_tile.cache_clear)
register_cache("primitives.row_plan.reduce_plans", reduce_plan.cache_clear)
