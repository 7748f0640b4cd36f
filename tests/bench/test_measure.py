"""The measurements of the benchmark: sizes, steps, buffers, replays, and memory."""

import pytest
import torch
from helpers.bench import CPU
from helpers.rows import devices
from torch import Tensor

from partita.bench import measure, providers, rows
from partita.bench.case import Buffers
from partita.testing import assert_within_budget


def test_steps_are_timed_in_order() -> None:
    told = []
    steps = [("a", lambda: told.append("a")), ("b", lambda: told.append("b"))]
    times = measure.time_steps(steps, CPU.device, before=lambda: told.append("-"), repetitions=4)
    assert list(times) == ["a", "b", "total"]
    assert {timing.repetitions for timing in times.values()} == {4}
    assert told == ["-", "a", "b"] * (4 + 1)  # a warm-up


def test_slow_steps_are_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SLOW_SECONDS", 0.0)
    calls: list[None] = []
    timing = measure.time_call(lambda: calls.append(None), CPU.device, 20)
    assert (timing.repetitions, len(calls)) == (3, 4)


def test_numbers_are_drawn_once() -> None:
    buffers = Buffers(CPU.device)
    first = buffers.normal("logits", (4, 6), torch.float32)
    second = buffers.normal("logits", (3, 5, 1), torch.float32)
    assert first.data_ptr() == second.data_ptr()
    assert first.data_ptr() != buffers.normal("gradient", (4, 6), torch.float32).data_ptr()
    assert buffers.normal("logits", (4, 6), torch.bfloat16).dtype == torch.bfloat16


@devices
def test_what_the_providers_compute(device: str) -> None:
    x = torch.randn(5, 40, device=device, generator=torch.Generator(device).manual_seed(0))
    target = torch.arange(5, device=device)
    assert_within_budget(rows.naive_softmax(x), torch.softmax(x.double(), -1), torch.softmax(x, -1))
    logprob, logsumexp, entropy, argmax = rows.token_stats(x, target)
    exact = x.double().log_softmax(-1)
    assert_within_budget(logprob, exact[range(5), target], scale="tensor")
    assert_within_budget(logsumexp, x.double().logsumexp(-1))
    assert_within_budget(entropy, torch.special.entr(exact.exp()).sum(-1), scale="tensor")
    assert torch.equal(argmax, exact.argmax(-1))
    inplace = providers.PARTITA_INPLACE.ops["cross_entropy"]()
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(inplace(leaf, target), leaf)
    assert torch.equal(grad, leaf.detach())


@pytest.mark.gpu
def test_replay_rotates_through_more_than_the_cache() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    for size in (1000, cache // 3, 10 * cache):
        sets = measure.rotation(size, device)
        assert 2 <= sets <= measure.MAX_CALLS
        assert sets * size >= measure.CACHES * cache or sets == measure.MAX_CALLS
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        return x + 1

    inputs = torch.zeros(3, 1000, device=device).unbind()
    timing = measure.time_replay(function, inputs, device, bytes_moved=10**8, repetitions=2)
    assert timing.least > 0
    assert {x.data_ptr() for x in calls} == {x.data_ptr() for x in inputs}
    assert len(calls) == 3 + 18  # a warm-up of each, and a graph that moves 2 GB in whole rounds
    calls.clear()
    measure.time_replay(function, inputs, device, bytes_moved=1000, repetitions=2)
    assert len(calls) == 3 + measure.MAX_CALLS // 3 * 3


@pytest.mark.gpu
def test_what_cannot_be_captured_is_refused() -> None:
    def function(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not here")
        return x + 1

    device = torch.device("cuda", torch.cuda.current_device())
    inputs = torch.zeros(3, 1000, device=device).unbind()
    with pytest.raises(ValueError, match="not here"):
        measure.time_replay(function, inputs, device, bytes_moved=10**8, repetitions=2)
    torch.cuda.synchronize(device)


@pytest.mark.gpu
def test_peak_memory_is_what_is_allocated() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    results = []
    steps = [
        ("a", lambda: torch.zeros(2**22, device=device)),
        ("b", lambda: results.append(torch.zeros(2**20, device=device))),
    ]
    assert measure.peak_extra_memory(steps, device) == 2**24
