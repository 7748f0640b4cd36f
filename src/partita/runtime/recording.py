"""Recording of what an op does on a GPU, so that later calls replay it in one C call.

A GPU function allocates, plans and launches in plain Python. That takes the host longer than the
GPU needs for small inputs, although equal calls do the same each time. So the second call of a key
(see `register.Op`) runs under a `Recorder`, which notes allocations, fills and launches and turns
them into a program of the C module. The program allocates the outputs and one workspace for all
temporary tensors, fills in their addresses, and launches every kernel.

A call that does anything else, such as arithmetic of PyTorch or a look at values on the device, is
refused and stays on the plain path.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launcher import members
from .private_names import TorchDispatchMode

WORKSPACE_ALIGNMENT = 256
ABSOLUTE = -1  # the slot of a value that is no address of an argument, an output or the workspace
LAUNCH, FILL, FORK, LEAVE, JOIN = range(5)  # the kinds of steps, as in programs.c
MAX_WORKSPACE = 2**26  # bytes; larger temporary tensors are freed and reused as the call goes on

_aten = torch.ops.aten
ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# The functions that allocate and fill, with the position of the value or None for zero.
FILLED_ALLOCATIONS = {
    _aten.zeros.default: None,
    _aten.zeros_like.default: None,
    _aten.new_zeros.default: None,
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.new_full.default: 2,
}
FILLS = {_aten.zero_.default: None, _aten.fill_.Scalar: 1}


class _Thread(threading.local):
    """The recorder of each thread. A default costs less to read than a missing attribute."""

    recorder: Recorder | None = None


thread = _Thread()


class Address(NamedTuple):
    """An address as an offset in bytes from the memory of a slot.

    Arguments have the first slots, and while an op is recorded, its buffers have those that follow.
    """

    slot: int
    offset: int


Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, stride and dtype of a tensor


def _spec(tensor: Tensor) -> Spec:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _memory(tensor: Tensor) -> range:
    """Return the addresses from the first element of a tensor to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return range(tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size())


def keep(*tensors: Tensor) -> None:
    """Tell the recorder that launches may read these cached tensors, which never change."""
    if (active := thread.recorder) is not None:
        for tensor in tensors:
            active.constants[tensor.untyped_storage().data_ptr()] = tensor


def depend_on(tensor: Tensor) -> None:
    """Tell the recorder that the values of this argument decide what is launched.

    The call is refused unless the op names the argument in `by_identity`.
    """
    active = thread.recorder
    if active is not None and not any(tensor is known for known in active.known):
        active.refuse("the values of an argument decide what it launches")


class Recorder(TorchDispatchMode):
    """Notes what an op does, in a `with` block.

    Args:
        args: the arguments of the op.
        by_identity: the positions of arguments that a replay takes only if they are the same.
    """

    def __init__(self, args: tuple[Any, ...], by_identity: Iterable[int] = ()) -> None:
        super().__init__()
        self.args, self.known = args, [args[position] for position in by_identity]
        self.reason: str | None = None  # why the call cannot be replayed
        self.constants: dict[int, Tensor] = {}
        self.kernels: list[Any] = []
        # The memory of each slot. Buffers are not owned, so a later one may lie where another was
        # freed, which nothing can refer to.
        self._memory = [_memory(arg) if isinstance(arg, Tensor) else range(0) for arg in args]
        self._buffers: list[Spec] = []  # the tensors that the op allocated
        self._steps: list[tuple[Any, ...]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because PyTorch would import its compiler at the first call otherwise."""
        return False

    def __enter__(self) -> Recorder:
        thread.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        thread.recorder = None

    def refuse(self, reason: str) -> None:
        """Give up; the first reason stays."""
        self.reason = self.reason or reason

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.reason is None:
            self._see(func, args, result)
        return result

    def _see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if func in ALLOCATIONS:
            self._allocate(result)
        elif func in FILLED_ALLOCATIONS:
            self._allocate(result)
            position = FILLED_ALLOCATIONS[func]
            self._fill(result, 0 if position is None else args[position])
        elif func in FILLS:
            position = FILLS[func]
            self._fill(args[0], 0 if position is None else args[position])
        elif not func.is_view and any(
            isinstance(value, (Tensor, list, tuple)) for value in (*args, result)
        ):  # Others neither read nor make a tensor, such as torch.promote_types.
            self.refuse(f"it calls {func}")

    def _allocate(self, tensor: Tensor) -> None:
        if tensor.device != self.args[0].device:
            self.refuse("it makes a tensor on another device")
        elif tensor.numel():
            self._memory.append(_memory(tensor))
            self._buffers.append(_spec(tensor))

    def _fill(self, tensor: Tensor, value: float) -> None:
        size = tensor.numel() * tensor.element_size()
        pattern = _pattern(value, tensor.dtype)
        if size == 0:
            return
        if pattern is None or size % 4 or not tensor.is_contiguous():
            self.refuse(f"it fills a tensor of {tensor.dtype} with {value}")
        elif (address := self._locate(tensor)) is not None:
            self._steps.append((FILL, 0, pattern, 0, 0, size // 4, (address,)))

    def launch(self, kernel: Any, programs: int, args: tuple[Any, ...]) -> None:
        """Note the launch of a bound kernel."""
        if self.reason is not None:
            return
        function, threads, shared, parameters = kernel.description
        cells, found = [], list(members(args))
        for i, letter in parameters:
            if letter == "p":
                cell = self._locate(found[i])
            else:
                cell = Address(ABSOLUTE, _bits(found[i], letter))
            if cell is None:
                return
            cells.append(cell)
        self.kernels.append(kernel)
        self._steps.append((LAUNCH, function, programs, threads, shared, 0, tuple(cells)))

    def change_stream(self, kind: int) -> None:
        """Note a FORK to the side stream, that launches LEAVE it, or its JOIN."""
        if self.reason is None:
            self._steps.append((kind, 0, 0, 0, 0, 0, ()))

    def _locate(self, tensor: Tensor) -> Address | None:
        """Return where a tensor lies, or refuse and return None if its origin is not known."""
        if tensor.numel() == 0:
            return Address(ABSOLUTE, 0)
        for i, arg in enumerate(self.args):
            if arg is tensor:
                return Address(i, 0)
        own = _memory(tensor)
        around = [
            (memory.start, slot)
            for slot, memory in enumerate(self._memory)
            if memory.start <= own.start and own.stop <= memory.stop
        ]
        if around:
            first, slot = around[-1]
            if slot >= len(self.args) or all(start == first for start, _ in around):
                return Address(slot, own.start - first)
            self.refuse("its arguments share memory")
        elif tensor.untyped_storage().data_ptr() in self.constants:
            return Address(ABSOLUTE, own.start)
        else:
            self.refuse("it uses a tensor of unknown origin")
        return None

    def program(self, module: Any, result: Any, drop: Callable[[], object]) -> Any:
        """Return the program of the call that returned `result`, or None if it was refused.

        Args:
            module: the C module.
            result: a tensor, a tuple of tensors, or None.
            drop: drops the program. It is called when an argument that counts by identity, or its
                memory, is freed: then other values may get its address.
        """
        results = [result] if isinstance(result, Tensor) else list(result or ())
        outputs: list[Spec] = []
        places: dict[int, Address] = {}  # of the buffers in outputs and the workspace
        entries = [self._result(tensor, outputs, places) for tensor in results]
        if self.reason is not None:
            return None
        workspace, slot = 0, len(self.args) + len(outputs)
        for buffer, memory in enumerate(self._memory[len(self.args) :]):
            if buffer not in places:
                places[buffer] = Address(slot, workspace)
                workspace += -(-len(memory) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        if workspace > MAX_WORKSPACE:
            self.refuse(f"it needs {workspace} bytes of temporary memory")
            return None
        if workspace:  # which has the last slot
            outputs.append(((workspace,), (1,), torch.uint8))

        def cell(address: Address) -> tuple[int, int]:
            if address.slot < len(self.args):
                return address
            place = places[address.slot - len(self.args)]
            return place.slot, place.offset + address.offset

        steps = tuple((*step[:-1], tuple(map(cell, step[-1]))) for step in self._steps)
        spec = None if result is None else entries[0] if isinstance(result, Tensor) else entries
        owners = [*self.known, *(tensor.untyped_storage() for tensor in self.known)]
        watches = [weakref.ref(owner, lambda _: drop()) for owner in owners]
        references = (self.kernels, list(self.constants.values()), watches)
        return module.Program(len(self.args), tuple(outputs), spec, steps, references)

    def _result(self, tensor: Any, outputs: list[Spec], places: dict[int, Address]) -> Any:
        """Return the entry of a result, the number of an output or a view of one.

        The result's memory becomes an output unless it is one already.
        """
        if not isinstance(tensor, Tensor):
            self.refuse(f"it returns {type(tensor).__name__}")
            return None
        size, stride, dtype = _spec(tensor)
        if tensor.numel() == 0:
            outputs.append((size, stride, dtype))
            return len(outputs) - 1
        address = self._locate(tensor)
        if address is None or address.slot < len(self.args):
            self.refuse("it returns a tensor that it did not make")
            return None
        buffer = address.slot - len(self.args)
        spec = self._buffers[buffer]
        if dtype != spec[2]:
            self.refuse("it returns a view in another dtype")
            return None
        if buffer not in places:
            places[buffer] = Address(len(self.args) + len(outputs), 0)
            outputs.append(spec)
        output = places[buffer].slot - len(self.args)
        if (size, stride) == spec[:2]:
            return output
        return output, size, stride, address.offset // tensor.element_size()


def _bits(value: float, letter: str) -> int:
    """Return the bits of a number as the C module passes it."""
    if letter == "i":
        return int(value) & 0xFFFFFFFFFFFFFFFF
    code = "<f" if letter == "f" else "<d"
    return int.from_bytes(struct.pack(code, value), "little")


def _pattern(value: float, dtype: torch.dtype) -> int | None:
    """Return the 32 bits that memory of this dtype and value repeats, or None if there are none."""
    try:
        element = bytes(torch.tensor([value], dtype=dtype).view(torch.uint8).tolist())
    except (RuntimeError, TypeError, ValueError):
        return None
    repeated = element * (4 // len(element)) if len(element) < 4 else element
    first, rest = repeated[:4], repeated[4:]
    return int.from_bytes(first, "little") if rest in (b"", first) else None
