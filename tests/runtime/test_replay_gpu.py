"""Replay on a GPU: the same bits as the plain path, from any thread, stream and launcher."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager import disconnect
from helpers.fresh import SOURCE, run_fresh
from torch import Tensor

import partita
from partita.runtime import launcher, recording, register
from partita.runtime.caches import clear_caches

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def labels(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def gradients(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """Return the result of a function and the gradients of its sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


def make_calls() -> dict[str, Callable[[], list[Tensor]]]:
    x, targets = numbers(8, 1000), labels(0, 1000, 8)
    long_rows, long_targets = numbers(16, 50257, dtype=torch.bfloat16), labels(0, 50257, 16)
    frames, words = numbers(50, 4, 20), labels(1, 20, 4, 10)
    broad, broad_words = numbers(40, 3, 3000), labels(1, 3000, 3, 20)
    lengths, word_lengths = torch.full((4,), 50), torch.full((4,), 10)
    tag_lengths = torch.tensor([50, 1, 17, 30], device=DEVICE)
    source = partita.debruijn_source(4, 3).to(DEVICE)
    scores, ends = numbers(50, 4, 64, 5), torch.zeros(4, 64, device=DEVICE)

    def ctc(logits: Tensor, words: Tensor, **options: Any) -> Tensor:
        T, N, _ = logits.shape
        S = words.shape[1]
        sizes = (torch.full((N,), T, device=DEVICE), torch.full((N,), S, device=DEVICE))
        return partita.ctc_loss(logits, words, *sizes, from_logits=True, **options)

    smooth = {"label_smoothing": 0.1, "softcap": 30.0}
    return {
        "softmax": lambda: gradients(lambda x: partita.softmax(x) * 1.5, x),
        "softmax, bf16": lambda: gradients(lambda x: partita.softmax(x) * 2.0, long_rows),
        "softmax, sum": lambda: gradients(partita.softmax, x),
        "logsumexp": lambda: gradients(partita.logsumexp, x),
        "cross_entropy": lambda: gradients(lambda x: partita.cross_entropy(x, targets), x),
        "cross_entropy, none": lambda: gradients(
            lambda x: partita.cross_entropy(x, targets, reduction="none"), x
        ),
        "cross_entropy, smooth": lambda: gradients(
            lambda x: partita.cross_entropy(x, targets, **smooth), x
        ),
        "cross_entropy, bf16": lambda: gradients(
            lambda x: partita.cross_entropy(x, long_targets), long_rows
        ),
        "token_stats": lambda: gradients(
            lambda x: torch.stack(partita.token_stats(x, targets)[:3]), x
        ),
        "token_stats, entropy": lambda: gradients(
            lambda x: partita.token_stats(x, targets).entropy, x
        ),
        "ctc_loss": lambda: gradients(lambda x: ctc(x, words), frames),
        "ctc_loss, sum": lambda: gradients(lambda x: ctc(x, words, reduction="sum"), frames),
        "ctc_loss, wide": lambda: gradients(lambda x: ctc(x, broad_words), broad),
        "ctc_align": lambda: list(
            partita.ctc_align(frames.log_softmax(-1), words, lengths, word_lengths)[:3]
        ),
        "logz": lambda: gradients(lambda x: partita.logz(x, source, ends, ends), scores),
        "linear_chain": lambda: gradients(
            lambda *x: partita.linear_chain(*x).logz(), numbers(50, 4, 10), numbers(10, 10)
        ),
        "linear_chain, ends": lambda: gradients(
            lambda *x: partita.linear_chain(*x, lengths=tag_lengths).logz(),
            *(numbers(50, 4, 10), numbers(10, 10), numbers(10), numbers(4, 10)),
        ),
        "linear_chain, more tokens": lambda: gradients(
            lambda *x: partita.linear_chain(*x).logz(), numbers(70, 9, 10), numbers(10, 10)
        ),
        "linear_chain, many states": lambda: gradients(
            lambda *x: partita.linear_chain(*x).logz(), numbers(9, 4, 150), numbers(150, 150)
        ),
        "viterbi": lambda: list(partita.Chain(scores, source).viterbi()),
        **{
            f"ctc_crf_decode, {method}": lambda method=method: list(
                partita.ctc_crf_decode(scores, state_len=3, alphabet_size=5, method=method)
            )
            for method in ("viterbi", "beam")
        },
        "ctc_crf": lambda: gradients(
            lambda x: partita.ctc_crf_loss(
                x, labels(1, 5, 4, 10), word_lengths, state_len=3, alphabet_size=5
            ),
            scores,
        ),
        **transducer_calls(),
    }


def transducer_calls() -> dict[str, Callable[[], list[Tensor]]]:
    B, T, U, V = 3, 12, 5, 9
    logits, durations = numbers(B, T, U + 1, V), numbers(B, T, U + 1, 3)
    targets = labels(1, V, B, U)
    lengths = torch.full((B,), T, device=DEVICE), torch.full((B,), U, device=DEVICE)
    tdt = (targets, *lengths, 0, (0, 1, 2))
    large, large_targets = numbers(1, 100, 41, 1025), labels(1, 1025, 1, 40)
    large_lengths = torch.full((1,), 100, device=DEVICE), torch.full((1,), 40, device=DEVICE)
    return {
        "rnnt_loss": lambda: gradients(
            lambda x: partita.rnnt_loss(x, targets, *lengths, blank=0), logits
        ),
        "rnnt_loss, one": lambda: gradients(
            lambda x: partita.rnnt_loss(x, targets[:1], *(n[:1] for n in lengths), blank=0),
            logits[:1],
        ),
        "rnnt_loss, overlap": lambda: gradients(
            lambda x: partita.rnnt_loss(x, large_targets, *large_lengths, blank=0), large
        ),
        "tdt_loss": lambda: gradients(lambda *x: partita.tdt_loss(*x, *tdt), logits, durations),
        "rnnt_align": lambda: list(partita.rnnt_align(logits, targets, *lengths, blank=0)),
        "tdt_align": lambda: list(partita.tdt_align(logits, durations, *tdt)),
    }


NAMES = [
    *("softmax", "softmax, bf16", "softmax, sum", "logsumexp", "cross_entropy"),
    *("cross_entropy, none", "cross_entropy, smooth", "cross_entropy, bf16", "token_stats"),
    "token_stats, entropy",
    *("ctc_loss", "ctc_loss, sum", "ctc_loss, wide", "ctc_align", "logz"),
    *("linear_chain", "linear_chain, ends", "linear_chain, more tokens"),
    *("linear_chain, many states", "viterbi"),
    *("ctc_crf_decode, viterbi", "ctc_crf_decode, beam", "ctc_crf"),
    *("rnnt_loss", "rnnt_loss, one", "rnnt_loss, overlap", "tdt_loss", "rnnt_align", "tdt_align"),
]


@pytest.fixture(scope="module")
def calls() -> dict[str, Callable[[], list[Tensor]]]:
    return make_calls()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the reasons why calls inside of the test are not replayed."""
    reasons: list[str] = []
    store = register.Op._record

    def noted(self: register.Op, key: bytes, args: tuple[Any, ...]) -> Any:
        result = store(self, key, args)
        if key in self.reasons:
            reasons.append(self.reasons[key])
        return result

    monkeypatch.setattr(register.Op, "_record", noted)
    clear_caches()
    yield reasons


def poison() -> None:
    """Leave NaN in the memory that the next allocations get."""
    for power in (12, 16, 20, 22):
        torch.full((2**power,), torch.nan, device=DEVICE)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for tensor, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
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


def test_the_calls_are_all(calls: dict[str, Callable[[], list[Tensor]]]) -> None:
    assert list(calls) == NAMES


@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "ctc_loss", "logz"])
def test_triton_launches_where_there_is_no_c_module(
    name: str, calls: dict[str, Callable[[], list[Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = calls[name]()
    monkeypatch.setattr(launcher, "module", lambda: None)
    disconnect(monkeypatch)
    for _ in range(3):
        assert_same(calls[name](), expected)


@pytest.mark.multigpu
@pytest.mark.parametrize("current", [0, 1])
def test_a_process_that_uses_the_second_gpu_alone(current: int) -> None:
    """PyTorch's device is that of no context while the first GPU is current and never used."""
    code = f"""
import torch
import test_replay_gpu as tests

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
    folders = SOURCE, Path(__file__).parents[1], Path(__file__).parent
    path = os.pathsep.join(map(str, folders))
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


def test_eight_threads_on_two_streams(calls: dict[str, Callable[[], list[Tensor]]]) -> None:
    names = ["softmax", "cross_entropy", "token_stats", "ctc_loss", "logz", "viterbi"]
    expected = {name: calls[name]() for name in names}
    torch.cuda.synchronize()
    clear_caches()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(streams[number % 2]):
                for i in range(12):
                    name = names[(number + i) % len(names)]
                    found = calls[name]()
                    streams[number % 2].synchronize()
                    assert_same(found, expected[name])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


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


def test_negated_views_are_read_with_their_sign() -> None:
    x = numbers(8, 1000)
    negated = torch._neg_view(x)
    for _ in range(3):
        torch.testing.assert_close(partita.softmax(negated), partita.softmax(-x))


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
    assert recording.recorder() is None
    assert torch._C._len_torch_dispatch_stack() == 0
