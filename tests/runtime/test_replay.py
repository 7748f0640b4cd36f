"""Recording and replay of an op's work by the C module, with a driver of host memory."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers.replay import Ops, aligned, scale_kernel

pytest.importorskip("triton")
from torch import Tensor

from partita.runtime import launcher, recording
from partita.runtime.recording import FORK, JOIN, LEAVE, Recorder


def test_a_replay_computes_from_the_new_arguments(ops: Ops) -> None:
    def op(x: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        temporary, result = torch.zeros(2, *x.shape), torch.empty_like(x)
        result.zero_()
        ops.launch(x, temporary[1], x.numel(), factor)
        ops.launch(temporary[1], result, x.numel(), 2.0)
        return result, result[1:, ::2], torch.empty(0, 3)

    assert ops.record(op, aligned(4, 5), 3.0).reason is None
    x = aligned(4, 5)
    ops.driver.log.clear()
    result, view, empty = ops.replay(x, 3.0)
    torch.testing.assert_close(result, 6 * x)
    torch.testing.assert_close(view, 6 * x[1:, ::2])
    assert view.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
    assert empty.shape == (0, 3)
    launched = ("launch", "scale_kernel", 3, 128, 16, None)
    assert ops.driver.log == [("fill", 0, 40), ("fill", 0, 20), launched, launched]
    second = ops.replay(x, 3.0)[0]
    assert second.data_ptr() != result.data_ptr() and torch.equal(second, result)


def test_an_op_that_writes_into_its_argument_returns_none(ops: Ops) -> None:
    def op(x: Tensor, y: Tensor) -> None:
        ops.launch(x, y, x.numel(), 1.0)

    assert ops.record(op, aligned(8), aligned(8)).reason is None
    x, y = aligned(8), aligned(8)
    expected = x + y
    assert ops.replay(x, y) is None
    torch.testing.assert_close(y, expected)


def test_what_is_freed_and_allocated_again_has_its_own_place(ops: Ops) -> None:
    def op(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for _ in range(3):  # the allocator of the CPU often returns the same memory
            temporary = torch.zeros_like(x)
            ops.launch(x, temporary, x.numel(), 1.0)
            ops.launch(temporary, result, x.numel(), 1.0)
            del temporary
        return result

    assert ops.record(op, aligned(100)).reason is None
    x = aligned(100)
    torch.testing.assert_close(ops.replay(x), 3 * x)


@pytest.mark.parametrize(
    ("make", "served"),
    [
        (lambda: aligned(4, 5), True),
        (lambda: aligned(5, 4), False),
        (lambda: aligned(5, 4).t(), False),
        (lambda: aligned(4, 5).double(), False),
        (lambda: aligned(21)[1:].view(4, 5), False),  # another alignment
        (lambda: aligned(4, 5).requires_grad_(), True),
        (lambda: torch.nn.Parameter(aligned(4, 5)), True),
    ],
)
def test_the_key_has_everything_that_a_plan_depends_on(
    make: Callable[[], Tensor], served: bool, ops: Ops
) -> None:
    def op(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        ops.launch(x, result, x.numel(), 1.0)
        return result

    ops.record(op, aligned(4, 5))
    with torch.no_grad():
        assert isinstance(ops.replay(make()), Tensor if served else bytes)


def test_values_of_other_arguments_and_shared_memory_are_in_the_key(ops: Ops) -> None:
    x, y = aligned(8), aligned(8)
    calls = [(1, "a"), (1.0, "a"), (True, "a"), (None, "a"), (1, "b"), (-1, "a"), (torch.half, "a")]
    keys = {ops.replay(x, y, *options) for options in calls}
    keys |= {ops.replay(x, x, 1, "a"), ops.replay(x, y[:7], 1, "a")}
    assert len(keys) == len(calls) + 2
    assert ops.replay(y, x, 1, "a") == ops.replay(x, y, 1, "a")


def test_lists_of_integers_are_in_the_key_by_their_values(ops: Ops) -> None:
    x = aligned(8)
    calls = [[0, 1, 2], [0, 1], [1, 2], [], [0, 12], 0]
    keys = [ops.replay(x, numbers, 3) for numbers in calls]
    assert len(set(keys)) == len(calls) and all(type(key) is bytes for key in keys)
    assert ops.replay(x, [0, 1, 2], 3) == keys[0]
    for other in ([0.5], ["a"], [x], (0, 1), [True], [2**80]):
        assert ops.replay(x, other, 3) is NotImplemented


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "args",
    [
        (torch._neg_view(torch.ones(2)),),
        (torch.ones(2), torch._neg_view(torch.ones(2))),
        (torch.ones(2, dtype=torch.complex64),),
        (torch._efficientzerotensor(2),),
        (torch.ones(2).as_subclass(Subclass),),
        (torch.ones(2, device="meta"),),
        (torch.ones(2), [1.0]),
        (torch.ones(2), (1,)),
        (torch.ones(2), 2**70),
        (torch.ones(2), object()),
        (1, 2),
        (),
    ],
)
def test_arguments_whose_address_or_value_is_not_enough_are_left_to_python(
    args: tuple[Any, ...], ops: Ops
) -> None:
    assert ops.replay(*args) is NotImplemented


def test_the_same_table_in_the_same_version_only(ops: Ops) -> None:
    replay = ops.driver.module.Replay({}, 0b10)
    x, table, other = aligned(8), aligned(8), aligned(8)
    key = replay(x, table)
    assert key == replay(aligned(8), table) and key != replay(x, other)
    keys = {key}
    for change in (lambda: table.add_(1), lambda: setattr(table, "data", aligned(8))):
        change()
        keys.add(replay(x, table))
    assert len(keys) == 3
    with torch.inference_mode():
        assert replay(x, aligned(8)) is NotImplemented  # such a tensor has no version


@pytest.mark.parametrize("freed", ["tensor", "memory"])
def test_a_program_holds_no_table_alive_and_goes_with_it(freed: str, ops: Ops) -> None:
    programs: dict[bytes, Any] = {}
    replay = ops.driver.module.Replay(programs, 0b10)
    x, table = aligned(8), torch.randn(8)
    memory = weakref.ref(table.untyped_storage())
    ops.kernels, key = {}, replay(x, table)
    with recording.Recorder((x, table), by_identity=(1,)) as recorder:
        result = torch.zeros_like(x)
        ops.launch(x, result, 8, 1.0)
        ops.launch(table, result, 8, 1.0)
    programs[key] = recorder.program(ops.driver.module, result, lambda: programs.pop(key, None))
    torch.testing.assert_close(replay(x, table), x + table)
    del recorder
    if freed == "tensor":
        del table
    else:
        table.data = torch.randn(8)
    assert not programs and memory() is None


@pytest.mark.parametrize(("name", "value"), [("PARTITA_CHECK", "1"), ("PARTITA_REPLAY", "0")])
def test_variables_turn_replay_off(
    name: str, value: str, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(ops.replay(aligned(8)), bytes)
    monkeypatch.setenv(name, value)
    assert ops.replay(aligned(8)) is NotImplemented


def test_a_profiler_s_hooks_and_other_devices_are_left_to_triton(ops: Ops) -> None:
    x = aligned(8)
    hooks = ops.driver.knobs.launch_enter_hook
    hooks.calls.append(print)
    assert ops.replay(x) is NotImplemented
    assert ops.driver.module.launch({}, scale_kernel, 1, (x,), {}) is NotImplemented
    hooks.calls.clear()
    ops.driver.knobs.launch_enter_hook = None
    assert isinstance(ops.replay(x), bytes)
    ops.driver.knobs.launch_enter_hook = hooks
    ops.driver.current = 1
    assert ops.replay(x) is NotImplemented
    assert ops.driver.module.launch({}, scale_kernel, 1, (x,), {}) is NotImplemented


def double(ops: Ops) -> Callable[[Tensor], Tensor]:
    """Return an op of one launch."""

    def op(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        ops.launch(x, result, x.numel(), 2.0)
        return result

    return op


@pytest.mark.parametrize("device", [None, 1])
def test_the_driver_launches_on_pytorch_s_device(device: int | None, ops: Ops) -> None:
    """A new thread has no context. One that went back to an unused GPU has another's."""
    ops.record(double(ops), aligned(8))
    ops.driver.log.clear()
    x, y = aligned(8), aligned(8)
    ops.driver.device = device
    torch.testing.assert_close(ops.replay(x), 2 * x)
    assert ops.driver.log[:2] == [("retain", 0), ("set context",)]
    ops.driver.device = device
    ops.launch(x, y, x.numel(), 0.0)


@pytest.mark.parametrize("device", [None, 0])
def test_tensors_that_are_not_on_pytorch_s_device_are_left_to_python(
    device: int | None, ops: Ops
) -> None:
    """The driver may have their device although PyTorch would allocate on its own."""
    ops.record(double(ops), aligned(8))
    x, launch = aligned(8), ops.driver.module.launch
    ops.driver.current, ops.driver.device = 1, device
    assert ops.replay(x) is NotImplemented
    assert launch(ops.kernels, scale_kernel, 1, (x, x, 8, 0.0), {}) is NotImplemented


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (lambda x: x + 1, "aten.add"),
        (lambda x: torch.empty_like(x).copy_(x), "aten.copy_"),
        (lambda x: torch.full_like(x, float(x.sum())), "aten.sum"),
        (lambda x: torch.empty(3, device="meta"), "another device"),
        (lambda x: x, "did not make"),
        (lambda x: torch.empty_like(x).view(torch.int32), "another dtype"),
        (lambda x: torch.full((3,), torch.nan, dtype=torch.float64), "fills"),
        (lambda x: (torch.empty_like(x), 3), "returns int"),
        (lambda x: torch.empty(2**27, dtype=torch.uint8)[:0], "temporary memory"),
    ],
)
def test_other_work_is_refused(op: Callable[[Tensor], Any], reason: str, ops: Ops) -> None:
    recorder = ops.record(op, aligned(8))
    assert reason in str(recorder.reason) and not ops.programs


def test_a_kernel_that_reads_an_unknown_tensor_is_refused(ops: Ops) -> None:
    table = aligned(8)

    def op(x: Tensor, known: bool) -> Tensor:
        result = torch.zeros_like(x)
        if known:
            recording.keep(table)
        ops.launch(table, result, 8, 1.0)
        return result

    assert ops.record(op, aligned(8), False).reason == "it uses a tensor of unknown origin"
    assert ops.record(op, aligned(8), True).reason is None
    torch.testing.assert_close(ops.replay(aligned(8), True), table)


def test_a_table_that_decides_launches_has_to_count_by_identity(ops: Ops) -> None:
    def op(x: Tensor) -> Tensor:
        recording.depend_on(x)
        return torch.zeros_like(x)

    x = aligned(8)
    assert ops.record(op, x).reason == "the values of an argument decide what it launches"
    with Recorder((x,), by_identity=(0,)) as recorder:
        op(x)
    assert recorder.reason is None


def test_arguments_that_share_memory_are_told_apart(ops: Ops) -> None:
    def op(x: Tensor, y: Tensor) -> Tensor:
        result = torch.zeros(4)
        ops.launch(x[:4], result, 4, 1.0)
        ops.launch(y[4:], result, 4, 1.0)
        return result

    memory = aligned(64)
    assert ops.record(op, memory[2:10], memory[:8]).reason == "its arguments share memory"
    assert ops.record(op, memory[:8], memory[6:14]).reason is None  # no part lies in both
    torch.testing.assert_close(ops.replay(memory[:8], memory[6:14]), memory[:4] + memory[10:14])
    assert ops.record(op, memory[:8], memory[32:40]).reason is None
    torch.testing.assert_close(ops.replay(memory[:8], memory[32:40]), memory[:4] + memory[36:40])
    ops.programs.clear()
    assert ops.record(op, memory[:8], memory[:8]).reason is None  # in the key: the same address
    x, y = aligned(8), aligned(8)
    torch.testing.assert_close(ops.replay(x, x), x[:4] + x[4:])
    assert isinstance(ops.replay(x, y), bytes)


@pytest.mark.parametrize(
    ("dtype", "value", "pattern"),
    [
        (torch.float32, 1.0, 0x3F800000),
        (torch.int32, -1, 0xFFFFFFFF),
        (torch.int64, -1, 0xFFFFFFFF),
        (torch.int64, 1, None),
        (torch.float64, 0.0, 0),
        (torch.float32, -0.0, 0x80000000),
        (torch.bfloat16, 1.0, 0x3F803F80),
        (torch.int8, 2, 0x02020202),
        (torch.bool, True, 0x01010101),
    ],
)
def test_patterns_of_fills(dtype: torch.dtype, value: float, pattern: int | None) -> None:
    assert recording._pattern(value, dtype) == pattern


def forked(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Record an op with a launch on a side stream and two others, and return its argument."""
    side = SimpleNamespace(cuda_stream=77), SimpleNamespace(cuda_event=55)
    monkeypatch.setattr(launcher._side, "streams", {0: side}, raising=False)

    def op(x: Tensor) -> Tensor:
        result, active = torch.zeros_like(x), recording.thread.recorder
        for kind in (FORK, None, LEAVE, None, JOIN, None):
            if kind is None:
                ops.launch(x, result, 8, 1.0)
            elif active is not None:
                active.change_stream(kind)
        return result

    x = aligned(8)
    ops.record(op, x)
    ops.driver.log.clear()
    return x


def test_launches_on_a_side_stream(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    x = forked(ops, monkeypatch)
    torch.testing.assert_close(ops.replay(x), 3 * x)
    main, side, event = None, 77, 55
    launches = [entry[-1] for entry in ops.driver.log if entry[0] == "launch"]
    assert launches == [side, main, main]
    events = [entry for entry in ops.driver.log if entry[0] in ("record", "wait")]
    assert events == [
        ("record", event, main),
        ("wait", event, side),
        ("record", event, side),
        ("wait", event, main),
    ]


def test_an_error_on_a_side_stream_leaves_none_apart(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the call is used again in the order of the main stream."""
    x = forked(ops, monkeypatch)
    ops.driver.status = 701
    with pytest.raises(RuntimeError, match="out of resources"):
        ops.replay(x)
    assert [entry[0] for entry in ops.driver.log[-3:]] == ["launch", "record", "wait"]
    assert ops.driver.log[-2:] == [("record", 55, 77), ("wait", 55, None)]


def test_views_of_a_workspace_are_arguments_of_launches(ops: Ops) -> None:
    def op(x: Tensor) -> Tensor:
        buffer, result = torch.zeros(16, dtype=torch.float64), torch.zeros_like(x)
        first, second = buffer.view(torch.float32).split([16, 16])
        ops.launch(x, second, x.numel(), 3.0)
        ops.launch(second, result, x.numel(), 2.0)
        ops.launch(first, result, x.numel(), 1.0)  # which is 0
        return result

    assert ops.record(op, aligned(8)).reason is None
    x = aligned(8)
    torch.testing.assert_close(ops.replay(x), 6 * x)


class Pair(NamedTuple):
    tensor: Tensor
    number: int


class Swapped(NamedTuple):
    number: Tensor
    tensor: int


def test_tuples_are_arguments_of_a_launch(ops: Ops) -> None:
    def op(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        ops.launch((x, Pair(result, x.numel())), (3.0,))
        return result

    assert ops.record(op, aligned(8)).reason is None
    x = aligned(8)
    torch.testing.assert_close(ops.replay(x), 3 * x)


def test_the_key_of_a_launch_has_the_structure_and_the_types_of_tuples(ops: Ops) -> None:
    x = aligned(8)
    launch = ops.driver.module.launch
    different: list[tuple[Any, ...]] = [
        (x, 3, x, 3),
        ((x, 3), (x, 3)),
        ((x, 3, x), 3),
        (((x,), 3), (x, 3)),
        (Pair(x, 3), (x, 3)),
        (Swapped(x, 3), (x, 3)),
        (Pair(x, 1), (x, 3)),
        ((x, 3), (x, 3), ()),
    ]
    keys = [launch({}, scale_kernel, 1, args, {}) for args in different]
    assert all(type(key) is bytes for key in keys) and len(set(keys)) == len(keys)
    assert launch({}, scale_kernel, 1, (Pair(aligned(8), 5), (x, 7)), {}) == keys[4]
    many = (x,) + ((3,) * 40,) * 2
    assert launch({}, scale_kernel, 1, many, {}) is NotImplemented  # more than 64 arguments
    deep: Any = x
    for _ in range(5000):
        deep = (deep,)
    assert launch({}, scale_kernel, 1, deep, {}) is NotImplemented


def test_the_key_of_a_launch_has_the_dtype_and_the_alignment_of_a_tensor(ops: Ops) -> None:
    buffer = aligned(64)
    keys = [
        ops.driver.module.launch({}, scale_kernel, 1, (tensor,), {})
        for tensor in (buffer, buffer[1:], buffer.view(torch.int32))
    ]
    assert len(set(keys)) == 3
    assert ops.driver.module.launch({}, scale_kernel, 1, (aligned(64)[8:],), {}) == keys[0]
    other = torch.ones(2, device="meta")
    assert ops.driver.module.launch({}, scale_kernel, 1, (other,), {}) is NotImplemented


@pytest.mark.parametrize(
    "arg",
    [
        torch.ones(2).as_subclass(Subclass),
        (torch.ones(2).as_subclass(Subclass), 0),
        (torch.ones(2), object()),
        ((torch.ones(2), [0]),),
        [torch.ones(2)],
        object(),
    ],
)
def test_triton_launches_where_the_memory_of_an_argument_is_not_known(arg: Any, ops: Ops) -> None:
    launch = ops.driver.module.launch
    assert launch({}, scale_kernel, 1, (torch.ones(2), arg), {}) is NotImplemented
