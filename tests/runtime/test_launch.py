"""Side streams, with stand-ins for the streams of a GPU: who waits for whom, and which thread has which."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
SideStream = pytest.importorskip("partita.runtime.launch").SideStream

DEVICE = torch.device("cuda", 0)


class Stream:
    """Of a stream, whom it waits for."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority, self.waits = device, priority, []  # type: ignore[var-annotated]

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The main stream, and the one that is current now."""
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
    monkeypatch.setattr(SideStream, "_streams", {})
    return state


GPU: Any = SimpleNamespace(is_cuda=True, device=DEVICE)


def test_launches_run_on_a_side_stream_between_two_waits(streams: Any) -> None:
    beside = SideStream(GPU, True)
    with beside:
        side = streams.now
    assert (
        side is not streams.main and side.priority == -1 and side.waits == [streams.main]
    )  # what the scans read is there
    assert (
        streams.now is streams.main and streams.main.waits == []
    )  # and what comes now runs beside them
    beside.join()
    assert streams.main.waits == [side]


@pytest.mark.parametrize(("tensor", "wanted"), [(GPU, False), (torch.zeros(1), True)])
def test_all_in_their_order_where_it_is_not_wanted_or_there_are_no_streams(
    tensor: Any, wanted: bool, streams: Any
) -> None:
    beside = SideStream(tensor, wanted)
    with beside:
        assert streams.now is streams.main
    beside.join()
    assert streams.main.waits == []


def test_a_thread_keeps_its_stream_and_another_has_its_own(streams: Any) -> None:
    first, again = SideStream(GPU, True), SideStream(GPU, True)
    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append(SideStream(GPU, True)))
    thread.start()
    thread.join()
    assert first.side is again.side and other[0].side is not first.side
    assert (
        SideStream(SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1)), True).side
        is not first.side
    )  # type: ignore[arg-type]


def test_an_error_inside_leaves_the_main_stream_current(streams: Any) -> None:
    beside = SideStream(GPU, True)
    with pytest.raises(RuntimeError, match="out of memory"), beside:
        raise RuntimeError("out of memory")
    assert streams.main.waits == []
    beside.join()
    assert streams.main.waits == [beside.side]
