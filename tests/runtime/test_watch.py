"""What is said of each call of an op: replayed, recorded, or why not, with a driver of memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.replay import Ops, aligned
from torch import Tensor

from partita.runtime import caches, launcher, private_names, recording
from partita.runtime.register import (
    BY_REFERENCE,
    LEFT_TO_PYTHON,
    NOT_RECORDED,
    RECORDED,
    REPLAYED,
    Op,
    watch,
)

NAME = "test_watch"


@pytest.fixture
def gpu(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> Ops:
    """Let ops take the CPU for a GPU."""
    monkeypatch.setattr(launcher, "module", lambda: ops.driver.module)
    monkeypatch.setattr(private_names, "current_device", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(caches, "_clear_functions", dict(caches._clear_functions))
    ops.kernels = {}
    return ops


def served(op: Op, calls: int, *args: Any) -> list[tuple[str, str]]:
    with watch() as found:
        for _ in range(calls):
            op(*args)
    return found


def twice(ops: Ops) -> Callable[..., Tensor]:
    def run(x: Tensor, backend: str) -> Tensor:
        result = torch.zeros_like(x)
        ops.launch(x, result, x.numel(), 2.0)
        return result

    return run


def test_the_third_call_is_replayed(gpu: Ops) -> None:
    op = Op(NAME, twice(gpu), twice(gpu))
    x = aligned(8)
    found = served(op, 4, x, "auto")
    assert found == [(NAME, NOT_RECORDED), (NAME, RECORDED), (NAME, REPLAYED), (NAME, REPLAYED)]
    assert served(op, 1, x, "auto") == [(NAME, REPLAYED)]
    torch.testing.assert_close(op(x, "auto"), 2 * x)


def test_the_reason_of_a_refusal_stays(gpu: Ops) -> None:
    op = Op(NAME, lambda x, backend: x + 1, lambda x, backend: x + 1)
    refused = (NAME, "it calls aten.add.Tensor")
    assert served(op, 5, aligned(8), "auto") == [(NAME, NOT_RECORDED), *[refused] * 4]


def test_a_program_that_is_dropped_is_recorded_again(gpu: Ops) -> None:
    op = Op(NAME, twice(gpu), twice(gpu))
    x = aligned(8)
    served(op, 3, x, "auto")
    op.programs.clear()
    assert served(op, 2, x, "auto") == [(NAME, RECORDED), (NAME, REPLAYED)]


def test_calls_that_are_never_recorded(gpu: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op(NAME, twice(gpu), twice(gpu))
    x = aligned(8)
    served(op, 3, x, "auto")
    assert served(op, 3, x, "reference") == [(NAME, BY_REFERENCE)] * 3
    assert served(op, 1, torch._neg_view(x), "auto") == [(NAME, LEFT_TO_PYTHON)]
    with monkeypatch.context() as patch:
        patch.setenv("PARTITA_REPLAY", "0")
        assert served(op, 1, x, "auto") == [(NAME, LEFT_TO_PYTHON)]
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "module", lambda: None)
        patch.setattr(launcher, "status", lambda: "no C compiler")
        patch.setattr(op, "_replay", None)
        assert served(op, 1, x, "auto") == [(NAME, "no C compiler")]
    assert served(op, 1, x, "auto") == [(NAME, REPLAYED)]


def test_what_is_no_call_of_a_gpu_is_not_listed(gpu: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = Op(NAME, twice(gpu), twice(gpu)), aligned(8)
    with watch() as found:
        x.softmax(0)
        with recording.Recorder((x,)):  # the op is a part of what is recorded
            op.eager(x, "auto")
        monkeypatch.setattr(torch.Tensor, "is_cuda", False)
        op(x, "auto")
    assert not found


def test_nothing_of_it_stays(gpu: Ops) -> None:
    serve = Op.eager
    with pytest.raises(ValueError, match="inside"), watch() as found:
        raise ValueError("inside")
    assert Op.eager is serve
    Op(NAME, twice(gpu), twice(gpu))(aligned(8), "auto")
    assert not found
