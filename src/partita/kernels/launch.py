"""How tensors become rows, and rows become launches."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .._backend import interpreting

INTERPRETED = interpreting()
NVIDIA = torch.version.hip is None
MOST_SPLITS = 64  # programs that may wait for one another: far below what any supported GPU keeps resident


def cdiv(number: int, by: int) -> int:
    """The quotient rounded up; Triton's own takes the host as long as a small tensor."""
    return -(-number // by)


def power_of_2(number: int) -> int:
    """The least power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()


class Rows(NamedTuple):
    """Tensors of one shape as `[batches, rows, classes]`; `tensors[i]` has the strides `strides[i]`."""

    tensors: tuple[Tensor, ...]
    batches: int
    rows: int
    classes: int
    strides: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=4096)
def _merge(dim: int, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> tuple[int, int, int, tuple[tuple[int, int, int], ...]] | None:
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
        if groups and all(outer == inner * shape[d] for outer, inner in zip(groups[-1][1:], steps, strict=True)):
            groups[-1] = [groups[-1][0] * shape[d], *steps]
        else:
            groups.append([shape[d], *steps])
    if len(groups) > 2:
        return None
    groups = [[1] + [0] * len(strides)] * (2 - len(groups)) + groups
    return groups[0][0], groups[1][0], classes, tuple((groups[0][i + 1], groups[1][i + 1], stride[dim]) for i, stride in enumerate(strides))


def rows_of(dim: int, *tensors: Tensor) -> Rows | None:
    """A view in common, without a copy; None where the dimensions besides `dim` do not merge into two."""
    merged = _merge(dim, tensors[0].shape, tuple([t.stride() for t in tensors]))
    return None if merged is None else Rows(tensors, *merged)


def rows_or_copy(dim: int, tensor: Tensor) -> Rows:
    """The tensor as rows, through a copy where its strides allow no view."""
    view = rows_of(dim, tensor) or rows_of(dim, tensor.contiguous())
    assert view is not None
    return view


def with_output(run: Callable[[Rows], None], dim: int, *inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """What `run` writes into the last tensor of a view of the inputs and of a new tensor like the first."""
    output = torch.empty_like(inputs[0], dtype=dtype)
    view = rows_of(dim, *inputs, output)
    if view is not None:
        run(view)
        return output
    return output.copy_(with_output(run, dim, *(t.contiguous() for t in inputs), dtype=dtype))


@dataclass(frozen=True)
class Plan:
    """How a kernel cuts its rows: `tile` holds whole rows, `row` shares one row among `splits` programs, `loop` reads a row in blocks."""

    kind: str
    rows: int  # rows a program
    block: int  # classes a block
    warps: int
    splits: int = 1
    registers: int | None = None
    vector: int = 1  # elements of an aligned access where rows start anywhere; 1 where plain accesses do
    contiguous: bool = True

    def lanes(self, itemsize: int) -> int:
        """Threads among which each row of a block lies, a vector of 16 bytes after the other; 1 where it does not lie so."""
        threads = 32 * self.warps
        one_by_one = self.contiguous and (self.rows == 1 or self.warps == 1) and self.block * itemsize >= 16 * threads
        return threads if one_by_one else 1

    @property
    def options(self) -> dict[str, Any]:
        limit = {"maxnreg": self.registers} if self.registers is not None and NVIDIA and not INTERPRETED else {}
        return {"num_warps": self.warps, **limit}


class Shape(NamedTuple):
    """What a plan depends on."""

    rows: int
    classes: int
    itemsize: int
    contiguous: bool  # the classes of a row lie side by side
    aligned: bool  # rows start on 16 bytes, or so unlike in the tensors that no common vectors serve them
    single: bool  # one batch


def shape_of(view: Rows, held: int = 1) -> Shape:
    """The shape of a launch whose programs hold the first `held` tensors."""
    sizes = [t.element_size() for t in view.tensors]
    starts = 0
    for t in view.tensors:
        starts |= t.data_ptr()
    return Shape(view.batches * view.rows, view.classes, max(sizes[:held]), *_layout(view.batches, view.classes, view.strides, tuple(sizes), starts % 16 == 0))


@functools.lru_cache(maxsize=4096)
def _layout(
    batches: int, classes: int, strides: tuple[tuple[int, int, int], ...], sizes: tuple[int, ...], starts_aligned: bool
) -> tuple[bool, bool, bool]:
    rows_aligned = all(stride[1] * size % 16 == 0 for stride, size in zip(strides, sizes, strict=True))
    in_step = starts_aligned and all(stride == strides[0] for stride in strides)
    contiguous = classes <= 1 or all(stride[2] == 1 for stride in strides)
    return contiguous, batches > 1 or (starts_aligned and rows_aligned) or not in_step, batches == 1


@functools.lru_cache(maxsize=4096)
def plan(shape: Shape, operands: int = 1, patched: bool = False) -> Plan:
    """Block sizes for kernels whose programs hold whole rows, or parts of one, of `operands` tensors, and may store one class of them again."""
    block = power_of_2(max(shape.classes, 1))
    half = shape.itemsize == 2
    if not shape.contiguous:
        if block <= 512:
            return Plan("tile", max(1, min(64, 8192 // block // operands)), block, 4, contiguous=False)
        return Plan("loop", 64, 64, 4, contiguous=False)
    vector = 1 if shape.aligned or block < (512 if half else 4096) or shape.itemsize > 4 else 16 // shape.itemsize
    elements = block * operands
    exchange = shape.single and not INTERPRETED
    if elements <= (32768 if shape.itemsize == 4 else 16384) and not (patched and exchange and shape.itemsize == 4 and block > 8192):
        if half and block > 8192 and operands == 1 and exchange:
            return Plan("row", 1, block, 4, registers=96, vector=vector)
        if vector > 1:
            return Plan("row", 1, block, max(1, min(elements // (512 if half else 1024), 16)), vector=vector)
        if elements <= 2048:  # 16 fp32 elements a thread, or 32 of a half type, and where that is one warp, no other to wait for
            rows, warps = max(1, (1024 if half else 512) // elements), 2 if elements > (2048 if half else 512) else 1
            return Plan("tile", rows, block, warps, contiguous=shape.aligned)
        return Plan("tile", 1, block, max(4, min(elements // (512 if half else 1024), 8 if half else 16)), contiguous=shape.aligned)
    edged = vector > 1 and not half  # the edges of an fp32 row cost the registers that would hold 16,384 columns
    wide = 8192 if edged or (operands > 1 and not half) else 16384
    splits = -(-shape.classes // wide)
    if exchange and shape.itemsize <= 4 and splits <= MOST_SPLITS:
        if edged and operands == 1:
            return Plan("row", 1, wide, 2, splits, 168, vector)
        return Plan("row", 1, wide, 4, splits, 96 if half and operands == 1 else 168, vector)
    return Plan("loop", 1, 4096, 4)


@functools.lru_cache(maxsize=4096)
def scan_plan(shape: Shape, carried: int = 2) -> Plan:
    """Block sizes for kernels that only read and carry so many numbers: several programs take a share of a row each where rows are few."""
    block = power_of_2(max(shape.classes, 1))
    if not shape.contiguous:
        return Plan("loop", 64, min(block, 64), 4, contiguous=False)
    if block < 4096:
        return Plan("loop", max(1, 1024 // block), block, 2)
    splits = 1
    if shape.itemsize <= 4 and shape.rows < 1024:
        splits = max(1, min(-(-2048 // max(shape.rows, 1)), -(-shape.classes // 8192), MOST_SPLITS))
    vector = 1 if shape.aligned or shape.itemsize > 4 else 16 // shape.itemsize
    if shape.itemsize == 2:
        share = shape.classes // splits
        if share <= 8192:
            return Plan("loop", 1, 2048, 1, splits, vector=vector)
        if carried > 2:
            return Plan("loop", 1, 2048, 2, splits, vector=vector)
        block, warps = (4096, 2) if share <= 16384 else (8192, 4) if share <= 131072 else (4096, 4)
        return Plan("loop", 1, block, warps, splits, vector=vector)
    if shape.itemsize == 4 and shape.classes // splits > 32768 and carried <= 2:
        return Plan("loop", 1, 8192, 8, splits, vector=vector)
    return Plan("loop", 1, 4096 if shape.itemsize == 4 else 2048, 4, splits, vector=vector)


def scan_plan_for(view: Rows, carried: int = 2) -> Plan:
    """The plan of a kernel that reads the view once."""
    return scan_plan(shape_of(view), carried)


def elementwise_plan(view: Rows) -> Plan:
    """Tiles for kernels in which no class waits for another."""
    if view.classes > 1 and any(stride[2] != 1 for stride in view.strides):
        return Plan("tile", 64, min(power_of_2(max(view.classes, 1)), 64), 4)
    block = min(power_of_2(max(view.classes, 1)), 4096)
    return Plan("tile", max(1, min(64, 2048 // block)), block, 8 if block >= 4096 else 4)


def scan_options(chosen: Plan, view: Rows) -> dict[str, Any]:
    """Compile-time arguments of the kernels that only read."""
    return {
        "SHARED": chosen.splits > 1,
        "BLOCK_SPLITS": max(2, power_of_2(chosen.splits)),
        "VEC": chosen.vector,
        "LANES": chosen.lanes(view.tensors[0].element_size()),
        **tile_options(chosen, view.tensors[0].dtype),
    }


def span_of(view: Rows, chosen: Plan) -> int:
    """Classes that each program of a row reads: a multiple of the block."""
    return cdiv(cdiv(view.classes, chosen.splits), chosen.block) * chosen.block


def counters(view: Rows, splits: int, words: int = 1) -> Tensor | None:
    """Zeroed memory for programs of which the last merges: for each row a counter, and a box for each program; none where one has it all."""
    return zeroed(view.tensors[0].device, 0 if splits == 1 else words * view.batches * view.rows * (splits + 1))[0]


def zeroed(device: torch.device, *words: int) -> list[Tensor | None]:
    """Zeroed 64-bit words for several kernels, from one allocation and one fill; none for those that need none."""
    sizes = [count + count % 2 for count in words]  # each starts on 16 bytes
    if not any(sizes):
        return [None] * len(words)
    parts = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    return [part if count else None for part, count in zip(parts, words, strict=True)]


def plan_for(view: Rows, operands: int = 1, patched: bool = False) -> Plan:
    """The plan of a kernel that holds the first `operands` tensors of the view."""
    return plan(shape_of(view, operands), operands, patched)


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_recent: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
MOST_RECENT = 4096


def known_of(args: Iterable[Any]) -> list[Any]:
    """All of arguments on which it may depend what is compiled, and more."""
    known: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            known += arg.dtype, arg.data_ptr() & 15 == 0
            if not NVIDIA:
                known.append(arg.untyped_storage().nbytes() < 2**31)
        else:
            known.append(arg)
    return known


_numbers: dict[tuple[Any, ...], int] = {}
_next_number = itertools.count()


def number_of(*args: Any) -> int:
    """The number of a call whose arguments settle those of several launches: it stands for all of them, so that these need not be looked at again."""
    known = tuple(known_of(args))
    found = _numbers.get(known)
    if found is None:
        if len(_numbers) >= MOST_RECENT:
            _numbers.clear()  # numbers are not given again
        found = _numbers[known] = next(_next_number)
    return found


def launch(kernel: Any, programs: int, *args: Any, call: Any = None, **options: Any) -> None:
    """Run `kernel` on the device and the current stream of its first tensor.

    `args` are its run-time arguments in order, `options` its compile-time ones. A kernel that was compiled for such arguments is called
    directly, which halves the time that the host takes, and with addresses, which Triton takes as they are; one that ran with the same numbers
    is found at once. So is one of a `call` (see `number_of`) that was made before.
    """
    if programs == 0:
        return
    device = args[0].device
    if device.type != "cuda":
        kernel[(programs,)](*args, **options)
        return
    index = device.index
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, programs, *args, call=call, **options)
        return
    known = known_of(args) if call is None else [call]
    exact = (id(kernel), index, *options.values(), *known)
    found = _recent.get(exact)
    if found is None:
        key = (id(kernel), index, *options.values(), *map(_kind, known_of(args)))
        found = _compiled.get(key)
        if found is None:
            compiled = kernel[(programs,)](*args, **options)
            _compiled[key] = compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
            return
        if len(_recent) >= MOST_RECENT:
            _recent.clear()
        _recent[exact] = found
    compiled, constants = found
    values = [arg.data_ptr() if isinstance(arg, Tensor) and arg.is_cuda else arg for arg in args]  # of other memory Triton says that it is out of reach
    compiled[(programs, 1, 1)](*values, *constants)


class Beside:
    """Launches that run beside those which the current stream gets from here to `join`, and before them where both are ready: short ones of few programs,
    beside one that fills the GPU. Where there are no streams, or it is not `wanted`, all run in their order."""

    _streams: ClassVar[dict[tuple[torch.device, int], torch.cuda.Stream]] = {}  # of each thread: one may capture a graph while another does not

    def __init__(self, tensor: Tensor, wanted: bool) -> None:
        self.context: AbstractContextManager[Any] = nullcontext()
        self.main = None
        if tensor.is_cuda and wanted:
            self.main = torch.cuda.current_stream(tensor.device)
            place = tensor.device, threading.get_ident()
            self.side = self._streams.get(place) or self._streams.setdefault(place, torch.cuda.Stream(tensor.device, priority=-1))
            self.side.wait_stream(self.main)
            self.context = torch.cuda.stream(self.side)

    def __enter__(self) -> None:
        self.context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.context.__exit__(*raised)

    def join(self) -> None:
        if self.main is not None:
            self.main.wait_stream(self.side)


def _kind(known: Any) -> Any:
    """All of an argument that Triton compiles anew for: dtype and alignment of a tensor; of an integer whether it is 1, a multiple of 16,
    and beyond 32 bits; nothing of a float."""
    if isinstance(known, int):
        return 1 if known == 1 else 2 + (known % 16 == 0) + 2 * (not -(2**31) <= known < 2**31)
    return float if isinstance(known, float) else known


def box_words(view: Rows, splits: int, words: int = 1) -> int:
    """Zeroed words for programs that share rows: the ticket, then `words` boxes for each of them; none where nothing is shared."""
    return 0 if splits == 1 else 1 + view.rows * view.batches * splits * words


def boxes(view: Rows, splits: int) -> Tensor | None:
    """These words, in an allocation of their own."""
    return zeroed(view.tensors[0].device, box_words(view, splits))[0]


def triton_dtype(dtype: torch.dtype) -> Any:
    """The accumulator's dtype for a kernel."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.lru_cache(maxsize=4096)
def tile_options(chosen: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments of the kernels over tiles and loops."""
    return {"WIDE": triton_dtype(dtype), "ROWS": chosen.rows, "BLOCK_V": chosen.block, **chosen.options}


def row_options(chosen: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments of the kernels over one row, or a part of one."""
    return {
        "HALF": chosen.registers is not None and dtype.itemsize == 2 and NVIDIA and not INTERPRETED,
        "SHARED": chosen.splits > 1,
        "STREAM": chosen.splits > 1 and chosen.vector == 1,
        "BLOCK_SPLITS": max(2, power_of_2(chosen.splits)),
        "VEC": chosen.vector,
        "BLOCK_V": chosen.block,
        **chosen.options,
    }
