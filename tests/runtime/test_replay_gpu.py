"""Replay on a GPU: the same bits as the plain path, from any thread, stream and launcher."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager import disconnect
from helpers.fresh import SOURCE, run_fresh
from helpers.gpu_calls import CASES, DEVICE, assert_same, gradients, labels, numbers, poison
from torch import Tensor

import partita
from partita.runtime import launcher, recording, register
from partita.runtime.caches import clear_caches

pytestmark = pytest.mark.gpu


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the reasons why calls inside of the test are not replayed."""
    reasons: list[str] = []
    store = register.Op._record

    def noted(self: register.Op, key: bytes, args: tuple[Any, ...]) -> Any:
        result = store(self, key, args)
        reasons.extend(self.refusals.get(key, []))
        return result

    monkeypatch.setattr(register.Op, "_record", noted)
    clear_caches()
    yield reasons


@pytest.mark.parametrize("name", CASES)
def test_replays_have_the_bits_of_the_plain_path(
    name: str,
    calls: dict[str, Callable[[], list[Tensor]]],
    refusals: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARTITA_REPLAY", "0")
    expected = calls[name]()
    monkeypatch.delenv("PARTITA_REPLAY")
    for _ in range(4):
        poison()
        assert_same(calls[name](), expected)
    assert launcher.module() is not None and refusals == []


@pytest.mark.long
@pytest.mark.multigpu
@pytest.mark.parametrize("current", [0, 1])
def test_a_process_that_uses_the_second_gpu_alone(current: int) -> None:
    """PyTorch's device is that of no context while the first GPU is current and never used."""
    code = f"""
import torch
from helpers import gpu_calls as tests

import partita

torch.cuda.set_device({current}) if {current} else None
tests.DEVICE = "cuda:1"
hidden, weight, targets = tests.numbers(8, 64), tests.numbers(1000, 64), tests.labels(0, 1000, 8)
calls = tests.make_calls() | {{"linear_cross_entropy": lambda: tests.gradients(
    lambda *x: partita.linear_cross_entropy(*x, targets), hidden, weight)}}
for name, call in calls.items():
    print(name, flush=True)
    expected = call()
    assert {{tensor.device.index for tensor in expected}} == {{1}}
    for _ in range(4):
        tests.assert_same(call(), expected)
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == {current}
    assert not torch._C._cuda_hasPrimaryContext(0)
"""
    path = os.pathsep.join(map(str, (SOURCE, Path(__file__).parents[1])))
    finished = run_fresh(code, {**os.environ, "PYTHONPATH": path})
    assert finished.code == 0, f"{finished.stdout.splitlines()[-1:]}: {finished.stderr}"


class Subclass(torch.Tensor):
    """A subclass as users write it, which has memory as other tensors do."""


@pytest.mark.parametrize("which", ["logits", "targets"])
def test_tensors_of_a_subclass_are_read_where_they_are(which: str) -> None:
    frames, words = numbers(50, 4, 20), labels(1, 20, 4, 10)
    lengths = torch.full((4,), 50), torch.full((4,), 10)

    def results(frames: Tensor, words: Tensor) -> list[Tensor]:
        poison()
        return gradients(lambda x: partita.ctc_loss(x, words, *lengths, from_logits=True), frames)

    expected = results(frames, words)
    if which == "logits":
        frames = frames.as_subclass(Subclass)
    else:
        words = words.as_subclass(Subclass)
    for _ in range(3):
        assert_same(results(frames, words), expected)


def test_new_shapes_of_ctc_have_the_bits_of_triton_s_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The C module and Triton compile and launch for the same parts of each workspace."""
    # Few and many classes, targets of several chunks, and odd sizes.
    kinds, sizes = ((20, 7), (20, 4), (6, 40), (5000, 10)), ((40, 2), (47, 3), (64, 16))
    shapes = [(T, N, C, S) for C, S in kinds for T, N in sizes]

    def call(T: int, N: int, C: int, S: int) -> list[Tensor]:
        words = labels(1, C, N, S)
        lengths = T - torch.arange(N) % 3, S - torch.arange(N) % 2
        poison()
        return gradients(
            lambda x: partita.ctc_loss(x, words, *lengths, from_logits=True), numbers(T, N, C)
        )

    clear_caches()
    found = [call(*shape) for shape in shapes]
    monkeypatch.setattr(launcher, "module", lambda: None)
    disconnect(monkeypatch)
    for shape, results in zip(shapes, found, strict=True):
        assert_same(call(*shape), results)


def test_values_are_checked_after_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_caches()
    x, targets = numbers(8, 1000).requires_grad_(), labels(0, 1000, 8)
    assert len({partita.cross_entropy(x, targets).item() for _ in range(4)}) == 1
    monkeypatch.setenv("PARTITA_CHECK", "1")
    with pytest.raises(IndexError, match="1000"):
        partita.cross_entropy(x, torch.full_like(targets, 1000))
    monkeypatch.delenv("PARTITA_CHECK")
    with pytest.raises(ValueError, match="target"):
        partita.cross_entropy(x, targets[:7])
    with pytest.raises(ValueError, match="device"):
        partita.cross_entropy(x, targets.cpu())
    with torch.autocast(DEVICE, torch.bfloat16):
        head = (numbers(8, 16).requires_grad_(), numbers(1000, 16))
        rounded = [partita.linear_cross_entropy(*head, targets) for _ in range(3)]
    exact = [partita.linear_cross_entropy(*head, targets) for _ in range(3)]
    assert all(torch.equal(loss, rounded[0]) for loss in rounded)
    assert all(torch.equal(loss, exact[0]) for loss in exact)
    assert not torch.equal(exact[0], rounded[0])


def test_launch_hooks_of_triton_see_every_kernel(
    calls: dict[str, Callable[[], list[Tensor]]],
) -> None:
    import triton

    for _ in range(3):
        expected = calls["cross_entropy"]()
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert_same(calls["cross_entropy"](), expected)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert any("cross_entropy" in name for name in seen)


def test_ten_thousand_calls_of_eight_threads_on_two_streams(
    calls: dict[str, Callable[[], list[Tensor]]],
) -> None:
    names = ["softmax", "cross_entropy", "token_stats", "ctc_loss", "logz", "viterbi"]
    expected = {name: calls[name]() for name in names}
    torch.cuda.synchronize()
    clear_caches()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    before = torch.cuda.memory_allocated()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(streams[number % 2]):
                wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
                for i in range(10_000 // 8):
                    name = names[(number + i) % len(names)]
                    for tensor, truth in zip(calls[name](), expected[name], strict=True):
                        assert tensor.shape == truth.shape
                        wrong += (tensor != truth).sum()
                assert wrong.item() == 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**20  # A leak of each call would be 5 MB.


@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "ctc_loss", "logz"])
def test_a_replay_is_captured_in_a_graph(
    name: str, calls: dict[str, Callable[[], list[Tensor]]]
) -> None:
    for _ in range(3):
        expected = calls[name]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = calls[name]()
    for tensor in found:
        tensor.zero_()
    graph.replay()
    assert_same(found, expected)


def test_a_table_that_changes_is_read_again() -> None:
    source = partita.debruijn_source(4, 3).to(DEVICE).clone()
    scores = numbers(10, 2, 64, 5)
    for _ in range(3):
        before = partita.logz(scores, source)
    source[:, 1:] = source[:, 1:].flip(1)
    for _ in range(3):
        after = partita.logz(scores, source)
        expected = partita.Chain(scores.double().cpu(), source.cpu()).logz()
        torch.testing.assert_close(after.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(before, after)


def test_no_recorder_stays_after_an_error() -> None:
    x = numbers(4, 8)
    with pytest.raises(RuntimeError), recording.Recorder((x,)):
        raise RuntimeError
    assert recording.thread.recorder is None
    assert torch._C._len_torch_dispatch_stack() == 0
