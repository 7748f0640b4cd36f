"""The rounds of a search: on a GPU they are a CUDA graph, which the host launches again and again.

The host looks at which sequences go on as it was some rounds ago, so that it never waits for work
that it has just launched. Rounds after the end of a sequence leave it as it is.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ...runtime import private_names
from ...runtime.backend import caller_stacklevel
from ...runtime.caches import register_cache
from ...runtime.launcher import side_stream

ROUNDS_BETWEEN_CHECKS = 4  # after which the host asks for the sequences that go on

Round = Callable[[], None]


class _Latest(threading.local):
    """The latest graph of each GPU, which keeps the memory of its temporaries for the next one.

    Otherwise each call would take new memory from the driver, and leave it to the allocator.
    Threads share none, since memory of a graph may be used by another one on the same stream alone.
    """

    def __init__(self) -> None:
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}


_latest = _Latest()
_failed: list[torch.cuda.CUDAGraph] = []  # PyTorch's allocators may hold pointers to them
_refused: WeakSet[Any] = WeakSet()  # predictors whose capture has failed, which is told once
register_cache("decode.transducer_rounds.graphs", lambda: _latest.graphs.clear())
register_cache("decode.transducer_rounds.refused", _refused.clear)


def repeat(run: Round, is_open: Tensor, limit: int, graphs: bool, predict: Any) -> None:
    """Call `run` until no sequence is open, or `limit` times.

    On a GPU it may run some more times. There the first call does its work, and prepares libraries
    and kernels for the capture of the second one in a graph.

    Args:
        run: a round, which writes its results and `is_open` where they are.
        is_open: `[B]` bool. A sequence that is not open stays so.
        limit: a bound on the number of rounds.
        graphs: whether a GPU replays a graph.
        predict: the user's predictor. After its capture has failed, it is not captured again.
    """
    if not is_open.is_cuda:
        for _ in range(limit):
            if not bool(is_open.any()):
                break
            run()
        return
    device, function = is_open.device, getattr(predict, "__func__", predict)
    current, (side, _) = torch.cuda.current_stream(device), side_stream(device.index)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            run()
            graphs = graphs and function not in _refused
            launch = _captured(run, device.index) if graphs else None
            if graphs and launch is None:
                _refused.add(function)
            _replay(launch or run, is_open, limit)
    finally:
        current.wait_stream(side)


def _replay(run: Round, is_open: Tensor, limit: int) -> None:
    """Launch rounds until none was open at the last but one time that the host asked."""
    # A later copy may overtake the look at this memory, and only says more about who has ended.
    seen = torch.empty(is_open.shape, dtype=torch.bool, pin_memory=True)
    events: list[torch.cuda.Event] = []
    for _ in range(0, limit, ROUNDS_BETWEEN_CHECKS):
        for _ in range(ROUNDS_BETWEEN_CHECKS):
            run()
        seen.copy_(is_open, non_blocking=True)
        events.append(torch.cuda.Event())
        events[-1].record()
        if len(events) > 1:
            events.pop(0).synchronize()
            if not bool(seen.any()):
                break


def _captured(run: Round, index: int) -> Round | None:
    """Return the replay of a round; None, with a warning, where capture fails."""
    graph, latest = torch.cuda.CUDAGraph(), _latest.graphs.get(index)
    pool = torch.cuda.graph_pool_handle() if latest is None else latest.pool()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    except Exception as error:
        _clean_up(graph, index, pool)
        reason = str(error.__context__ or error).strip().partition("\n")[0]
        warnings.warn(
            "partita: predict, join or a model cannot be captured in a CUDA graph, so that each"
            f" launch costs host time; graphs=False says that it need not try: {reason}",
            RuntimeWarning,
            stacklevel=caller_stacklevel(),
        )
        return None
    _latest.graphs[index] = graph
    return graph.replay


def _clean_up(graph: torch.cuda.CUDAGraph, index: int, pool: Any) -> None:
    """Leave the capture that has failed.

    PyTorch ends only captures that succeed. The allocator has to be told, and a small graph takes
    the generator of random numbers out of the capture. Its memory is for the next search.
    """
    private_names.abandon_pool(index, pool)
    graph.reset()
    _failed.append(graph)
    small = torch.cuda.CUDAGraph()
    zero = torch.zeros((), device=torch.device("cuda", index))
    small.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    zero.add_(1)
    small.capture_end()
    _latest.graphs[index] = small
