"""How tensors become rows, and rows become launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._backend import interpreting

MOST_SPLITS = 64  # programs that may wait for one another: far below what any supported GPU keeps resident


@dataclass(frozen=True)
class Rows:
    """Tensors of one shape as `[batches, rows, classes]`; `tensors[i]` has the strides `strides[i]`."""

    tensors: tuple[Tensor, ...]
    batches: int
    rows: int
    classes: int
    strides: tuple[tuple[int, int, int], ...]

    @property
    def contiguous(self) -> bool:
        """Whether the classes of a row lie side by side in every tensor."""
        return self.classes <= 1 or all(stride[2] == 1 for stride in self.strides)


def rows_of(dim: int, *tensors: Tensor) -> Rows | None:
    """A view in common, without a copy; None where the dimensions besides `dim` do not merge into two."""
    shape = tensors[0].shape
    dim %= len(shape)
    classes = shape[dim]
    others = [d for d in range(len(shape)) if d != dim]
    count = math.prod(shape[d] for d in others)
    if dim == len(shape) - 1 and all(t.is_contiguous() for t in tensors):
        return Rows(tensors, 1, count, classes, ((0, classes, 1),) * len(tensors))
    groups: list[list[int]] = []  # of [size, stride in tensor 0, stride in tensor 1, ...]
    for d in others:
        if shape[d] == 1:
            continue
        strides = [t.stride(d) for t in tensors]
        if groups and all(outer == inner * shape[d] for outer, inner in zip(groups[-1][1:], strides, strict=True)):
            groups[-1] = [groups[-1][0] * shape[d], *strides]
        else:
            groups.append([shape[d], *strides])
    if len(groups) > 2:
        return None
    groups = [[1, *(0 for _ in tensors)]] * (2 - len(groups)) + groups
    steps = tuple((outer, inner, t.stride(dim)) for t, outer, inner in zip(tensors, groups[0][1:], groups[1][1:], strict=True))
    return Rows(tensors, groups[0][0], groups[1][0] if count else 0, classes, steps)


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

    @property
    def options(self) -> dict[str, Any]:
        limit = {} if self.registers is None or interpreting() else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit}


@functools.lru_cache(maxsize=4096)
def plan(classes: int, itemsize: int, *, contiguous: bool, aligned: bool, operands: int, exchange: bool) -> Plan:
    """Block sizes for rows of `classes` elements, of which a program holds `operands` at once; `aligned` rows start on 16 bytes."""
    block = triton.next_power_of_2(max(classes, 1))
    half = itemsize == 2
    if not contiguous:
        if block <= 512:
            return Plan("tile", max(1, min(64, 8192 // block // operands)), block, 4)
        return Plan("loop", 64, 64, 4)
    vector = 1 if aligned or block < (512 if half else 4096) or itemsize > 4 else 16 // itemsize
    elements = block * operands
    if elements <= (16384 if itemsize != 4 else 32768):
        if vector > 1:
            return Plan("row", 1, block, max(1, min(elements // (512 if half else 1024), 16)), vector=vector)
        if half and block > 8192 and operands == 1 and not interpreting():
            return Plan("row", 1, block, 4, registers=96)
        rows = max(1, (2048 if half else 1024) // elements)
        return Plan("tile", rows, block, max(4, min(rows * elements // (512 if half else 1024), 8 if half else 16)))
    wide = 16384 if half else 16384 // operands
    splits = -(-classes // wide)
    if exchange and itemsize <= 4 and splits <= MOST_SPLITS:
        return Plan("row", 1, wide, 4, splits, 96 if half and operands == 1 else 168, vector)
    return Plan("loop", 1, 4096, 4)


@functools.lru_cache(maxsize=4096)
def scan_plan(rows: int, classes: int, itemsize: int, *, contiguous: bool, aligned: bool) -> Plan:
    """Block sizes for kernels that only read: several programs take a share of a row each where rows are few or wide."""
    block = triton.next_power_of_2(max(classes, 1))
    if not contiguous:
        return Plan("loop", 64, min(block, 64), 4)
    if block < 4096:
        return Plan("loop", max(1, 4096 // block), block, 4)
    splits = 1
    if itemsize <= 4 and rows < 2048:
        splits = max(1, min(-(-4096 // max(rows, 1)), -(-classes // 8192), MOST_SPLITS))
    vector = 1 if aligned or itemsize > 4 else 16 // itemsize
    if itemsize == 2 and classes // splits > 8192:
        return Plan("loop", 1, 8192, 4, splits, vector=vector)
    return Plan("loop", 1, 4096 if itemsize < 8 else 2048, 2 if itemsize == 2 else 4, splits, vector=vector)


def scan_plan_for(view: Rows) -> Plan:
    """The plan of a kernel that reads the first tensor of the view."""
    itemsize = view.tensors[0].element_size()
    single = view.batches == 1
    return scan_plan(view.rows, view.classes, itemsize, contiguous=view.contiguous, aligned=not single or aligned(view) or not in_step(view))


def elementwise_plan(view: Rows) -> Plan:
    """Tiles for kernels in which no class waits for another."""
    if not view.contiguous:
        return Plan("tile", 64, min(triton.next_power_of_2(max(view.classes, 1)), 64), 4)
    block = min(triton.next_power_of_2(max(view.classes, 1)), 4096)
    return Plan("tile", max(1, 2048 // block), block, 8 if block >= 4096 else 4)


def scan_options(chosen: Plan, view: Rows) -> dict[str, Any]:
    """Compile-time arguments of the kernels that only read."""
    return {
        "SHARED": chosen.splits > 1,
        "BLOCK_SPLITS": max(2, triton.next_power_of_2(chosen.splits)),
        "VEC": chosen.vector,
        "LANES": 32 * chosen.warps,
        **tile_options(chosen, view.tensors[0]),
    }


def span_of(view: Rows, chosen: Plan) -> int:
    """Classes that each program of a row reads: a multiple of the block."""
    return triton.cdiv(triton.cdiv(view.classes, chosen.splits), chosen.block) * chosen.block


def counters(view: Rows, splits: int, words: int = 1) -> Tensor | None:
    """Zeroed memory for programs of which the last merges: for each row a counter, and a box for each program; none where one has it all."""
    if splits == 1:
        return None
    return torch.zeros(words * view.batches * view.rows * (splits + 1), dtype=torch.int64, device=view.tensors[0].device)


def aligned(view: Rows) -> bool:
    """Whether every row of every tensor starts on 16 bytes."""
    return all(
        (t.data_ptr() | stride[1] * t.element_size()) % 16 == 0
        for t, stride in zip(view.tensors, view.strides, strict=True)
    )


def in_step(view: Rows) -> bool:
    """Whether rows that start off 16 bytes do so alike in every tensor, so that one set of vectors serves all."""
    return all(t.data_ptr() % 16 == 0 and stride == view.strides[0] for t, stride in zip(view.tensors, view.strides, strict=True))


def plan_for(view: Rows, operands: int = 1, exchange: bool = True) -> Plan:
    """The plan of a kernel that holds the first `operands` tensors of the view."""
    itemsize = max(t.element_size() for t in view.tensors[:operands])
    single = view.batches == 1
    return plan(
        view.classes,
        itemsize,
        contiguous=view.contiguous,
        aligned=not single or aligned(view) or not in_step(view),
        operands=operands,
        exchange=exchange and single and not interpreting(),
    )


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Run `kernel` on the device and the current stream of its first tensor.

    `args` are its run-time arguments in order, `options` its compile-time ones. A kernel that was compiled for such arguments is called
    directly, which halves the time that the host takes; `key` holds all that Triton compiles anew for: the options, dtype and alignment
    of tensors, and of integers whether they are 1, multiples of 16, and beyond 32 bits.
    """
    if programs == 0:
        return
    device = args[0].device
    if device.type != "cuda":
        kernel[(programs,)](*args, **options)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, *args, **options)
        return
    key: list[Any] = [id(kernel), device.index, *options.values()]
    for arg in args:
        if isinstance(arg, Tensor):
            key += (arg.dtype, arg.data_ptr() % 16 == 0)
        elif isinstance(arg, int):
            key.append(1 if arg == 1 else 2 + (arg % 16 == 0) + 2 * (arg >= 2**31 or arg < -(2**31)))
        else:
            key.append(arg is None)
    found = _compiled.get(tuple(key))
    if found is None:
        compiled = kernel[(programs,)](*args, **options)
        _compiled[tuple(key)] = compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
    else:
        compiled, constants = found
        compiled[(programs, 1, 1)](*args, *constants)


def boxes(view: Rows, splits: int, words: int = 1) -> Tensor | None:
    """Zeroed memory for programs that share rows: the ticket, then `words` boxes for each of them; none where nothing is shared."""
    if splits == 1:
        return None
    return torch.zeros(1 + view.rows * view.batches * splits * words, dtype=torch.int64, device=view.tensors[0].device)


def triton_dtype(dtype: torch.dtype) -> Any:
    """The accumulator's dtype for a kernel."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def tile_options(chosen: Plan, tensor: Tensor) -> dict[str, Any]:
    """Compile-time arguments of the kernels over tiles and loops."""
    return {"WIDE": triton_dtype(tensor.dtype), "ROWS": chosen.rows, "BLOCK_V": chosen.block, **chosen.options}


def row_options(chosen: Plan, tensor: Tensor) -> dict[str, Any]:
    """Compile-time arguments of the kernels over one row, or a part of one."""
    return {
        "HALF": chosen.registers is not None and tensor.element_size() == 2 and torch.version.cuda is not None,
        "SHARED": chosen.splits > 1,
        "BLOCK_SPLITS": max(2, triton.next_power_of_2(chosen.splits)),
        "VEC": chosen.vector,
        "BLOCK_V": chosen.block,
        **chosen.options,
    }
