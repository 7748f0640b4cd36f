"""Side streams, with stand-ins for the streams of a GPU, and the arguments that launches take."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from helpers.launches import Launch, call_all, recording

from partita.runtime import launcher
from partita.runtime.caches import clear_caches
from partita.runtime.launch import (
    _kernels,
    compiler_options,
    launch,
    launch_alongside,
    tuple_types,
)


class Pair(NamedTuple):
    """What a kernel takes as one argument."""

    tensor: Any
    number: int


DEVICE = torch.device("cuda", 0)


class Stream:
    """A stand-in for a stream that records which streams it waits for."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority, self.waits = device, priority, []  # type: ignore[var-annotated]

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the streams of PyTorch; return the main stream, and the one that is current."""
    state = SimpleNamespace(main=Stream(DEVICE), now=None)
    state.now = state.main

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before, state.now = state.now, stream
        try:
            yield
        finally:
            state.now = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.now)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(launcher, "_side", threading.local())
    return state


GPU: Any = SimpleNamespace(is_cuda=True, device=DEVICE)


def test_launches_run_on_a_side_stream_between_two_waits(streams: Any) -> None:
    found: list[tuple[Any, list[Any]]] = []  # the stream of each function, and what main waits for

    def run() -> None:
        found.append((streams.now, [*streams.main.waits]))

    launch_alongside(GPU, run, run)
    (side, _), (main, waits) = found
    assert side is not streams.main and side.priority == -1
    assert side.waits == [streams.main]  # the launches read what the main stream has computed
    # The following launches of the main stream overlap with them.
    assert main is streams.now is streams.main and waits == []
    assert streams.main.waits == [side]


def test_all_in_their_order_where_there_are_no_streams(streams: Any) -> None:
    found: list[int] = []
    launch_alongside(torch.zeros(1), lambda: found.append(1), lambda: found.append(2))
    assert found == [1, 2] and streams.main.waits == []


def test_each_thread_has_its_own_stream(streams: Any) -> None:
    def stream_of(index: int) -> Any:
        return launcher.side_stream(index)[0]

    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append(stream_of(0)))
    thread.start()
    thread.join()
    assert stream_of(0) is stream_of(0) and stream_of(0) is not other[0]
    assert stream_of(1) is not stream_of(0)


def test_the_streams_join_after_an_error(streams: Any) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    for functions in ((fail, fail), (lambda: None, fail)):
        streams.main.waits.clear()
        with pytest.raises(RuntimeError, match="out of memory"):
            launch_alongside(GPU, *functions)
        assert streams.now is streams.main
        assert streams.main.waits == [launcher.side_stream(0)[0]]


def test_kernels_have_no_checks_of_overflow_except_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compiler_options() == {"enable_fp_fusion": True, "sanitize_overflow": False}
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    assert compiler_options() == {"enable_fp_fusion": True}
    monkeypatch.undo()
    monkeypatch.setattr(triton, "__version__", "2.9.0")
    assert compiler_options() == {}


def test_tuples_are_listed_by_member() -> None:
    pair, outer = Pair(torch.arange(8), 3), (torch.zeros(2),)
    args = (2.0, pair, (outer, None))
    assert list(launcher.members(args)) == [2.0, pair.tensor, 3, outer[0], None]
    assert list(tuple_types(args)) == [Pair, tuple, tuple]


@triton.jit
def scaled_sum_kernel(pair, result, others, size, BLOCK: tl.constexpr):
    """Store number times the pair's tensor, plus the other tensors that are there."""
    lane = tl.arange(0, BLOCK)
    total = tl.load(pair.tensor + lane, mask=lane < size) * pair.number
    if others[0] is not None:
        total += tl.load(others[0] + lane, mask=lane < size)
    total += tl.load(others[1][0] + lane, mask=lane < size)
    tl.store(result + lane, total, mask=lane < size)


@pytest.mark.gpu
@pytest.mark.parametrize("has_first", [False, True])
def test_kernels_take_tuples_and_arguments_by_name(has_first: bool) -> None:
    clear_caches()
    x, y, z = torch.randint(-8, 9, (3, 20), device="cuda").float()  # so that all sums are exact
    others = (y if has_first else None, (z,))
    for number in (1, 3, 4, 16):  # of which Triton compiles 1 and 16 apart
        results = [torch.full_like(x, torch.nan) for _ in range(3)]
        expected = number * x + z + (y if has_first else 0)
        for result in results[:2]:
            names = {"others": others, "size": 20, "result": result}
            launch(scaled_sum_kernel, 1, Pair(x, number), **names, BLOCK=32)
        launch(scaled_sum_kernel, 1, Pair(x, number), results[2], others, 20, BLOCK=32)
        assert all(torch.equal(result, expected) for result in results)
    # The C module has launched them: with 1, with 16, and with other numbers. Whether an argument
    # has a name makes no difference.
    assert len(_kernels) == 3


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_calls_pass_the_same_objects(dtype: torch.dtype) -> None:
    """The key of a launch names an option that is no number or text by its address.

    If a call made it anew, Triton would be asked for the kernel at each call.
    """
    launches: list[Launch] = []
    with recording(launches, "13.0"):
        call_all(dtype)
        number = len(launches)
        call_all(dtype)
    assert len(launches) == 2 * number > 1000
    made_anew = {
        (launch.kernel.__name__, name)
        for launch, other in zip(launches[:number], launches[number:], strict=True)
        for (name, value), (other_name, again) in zip(
            launch.options.items(), other.options.items(), strict=True
        )
        if name is not other_name
        or not (isinstance(value, bool | int | float | str) or value is again)
    }
    assert not made_anew
