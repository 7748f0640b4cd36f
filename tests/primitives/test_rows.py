"""Functions of rows on a CPU, which compute a few rows at a time."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.rows import INTERPRETING
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import partita
from partita.primitives import rows
from partita.testing import sample_rows

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the CPU backend only")
CLASSES = 64
MARKER = 12_347  # bytes of an allocation that nothing else makes


def calls(x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions of logits `[M, C]`, whose results are sums or have the shape `[M, ...]`."""
    target = torch.arange(len(x)) % CLASSES
    target[::3] = -100
    probabilities, weight = x.detach().softmax(1), torch.linspace(0.5, 1, x.shape[1])
    weight, ids = weight.to(x.dtype), torch.stack([target.clamp(min=0), target.clamp(min=0) ^ 1], 1)
    teacher = x.detach().flip(0)
    known = partita.topk_logprobs(teacher, 3)

    def entropy(x: Tensor) -> Tensor:
        return torch.stack(partita.token_stats(x, target)[:3])

    return {
        "losses": lambda x: partita.cross_entropy(x, target, weight, reduction="none", softcap=9.0),
        "loss": lambda x: partita.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.1),
        "probabilities": lambda x: partita.cross_entropy(x, probabilities, softcap=9.0),
        "statistics": entropy,
        "logprobs": lambda x: partita.logprobs(x, ids),
        "topk_logprobs": lambda x: partita.topk_logprobs(x, 3).logprobs,
        "kl": lambda x: partita.divergence(x, teacher),
        "jsd": lambda x: partita.divergence(x, teacher, beta=0.5, reduction="none"),
        "topk_divergence": lambda x: partita.topk_divergence(x, known, reduction="none"),
        "softmax": lambda x: partita.softmax(x)[:, 0],
        "logsumexp": lambda x: partita.logsumexp(x),
    }


def train(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    found = f(leaf)
    return found.detach(), torch.autograd.grad(found.sum(), leaf)[0]


def peaks_of(functions: Iterable[Callable[[], Any]]) -> list[int]:
    """Return the most bytes that each function has allocated at once on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others would wait for each other in each small call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        for f in functions:
            torch.empty(MARKER, dtype=torch.uint8)  # separates the functions
            f()
    torch.set_num_threads(threads)
    assert found.profiler is not None and found.profiler.kineto_results is not None
    present, peaks = 0, list[int]()
    for event in sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            if event.nbytes() == MARKER:
                present = 0
                peaks.append(0)
            present += event.nbytes()
            peaks[-1] = max(peaks[-1], present)
    return peaks


def test_a_wide_row_alone_has_the_bits_that_it_has_among_others() -> None:
    """PyTorch's threads share the sum of a single row, in another order."""
    g, classes = torch.Generator().manual_seed(0), 50_257
    x, teacher = (torch.randn(3, classes, generator=g) for _ in range(2))
    target = torch.randint(classes, (3,), generator=g)

    def outcome(*rows: Tensor) -> list[Tensor]:
        x, teacher, target = rows
        found = []
        for f in (
            lambda x: torch.stack(partita.token_stats(x, target, temperature=0.7)[:3]).sum(0),
            lambda x: partita.divergence(x, teacher, beta=0.3, reduction="none"),
            lambda x: partita.divergence(x, teacher, reduction="none"),
        ):
            found += train(f, x)
        return found

    threads, sums = torch.get_num_threads(), x.sum(-1)
    torch.set_num_threads(2)
    together = outcome(x, teacher, target)
    for i in range(3):
        for some in (slice(i, i + 1), i):  # a batch of one row, and a row without a batch
            found = outcome(*(each[some] for each in (x, teacher, target)))
            assert all(map(torch.equal, found, (each[some] for each in together)))
    # Otherwise the test proves nothing.
    assert any(not torch.equal(x[i].sum(), sums[i]) for i in range(3))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_memory_is_that_of_a_few_rows(dtype: torch.dtype, monkeypatch) -> None:
    """No half-precision input is copied to fp32 as a whole, neither for a result nor a gradient."""
    elements = 2**13
    monkeypatch.setattr(rows, "ELEMENTS", elements)
    x = sample_rows(128, 4096, dtype=dtype)
    bound = 16 * 4 * elements + 50 * 4 * len(x)  # of a block, and of numbers of all rows
    assert 3 * bound < 4 * x.numel()
    functions = calls(x)
    bounds = {name: (bound, bound + x.nbytes) for name in functions}
    bounds["softmax"] = (bound + x.nbytes, bound + 3 * x.nbytes)  # which has results of that size

    def without_gradient(f: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            f(x)

    peaks = peaks_of(
        partial(run, f)
        for f in functions.values()
        for run in (without_gradient, lambda f: train(f, x))
    )
    found = dict(zip(functions, zip(peaks[::2], peaks[1::2], strict=True), strict=True))
    too_many = {
        name: pair
        for name, pair in found.items()
        if pair[0] > bounds[name][0] or pair[1] > bounds[name][1]
    }
    assert not too_many, bounds


@pytest.mark.parametrize("name", calls(torch.zeros(2, CLASSES)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_blocks_give_the_bits_of_all_rows(dtype: torch.dtype, name: str, monkeypatch) -> None:
    for x in (sample_rows(7, CLASSES, dtype=dtype), sample_rows(CLASSES, 7, dtype=dtype).T):
        f = calls(x)[name]
        whole = train(f, x)
        for elements in (1, 3 * CLASSES):
            monkeypatch.setattr(rows, "ELEMENTS", elements)
            for a, b in zip(train(f, x), whole, strict=True):
                assert a.stride() == b.stride()
                if a.shape:
                    assert torch.equal(a, b)
                else:  # a sum of the rows, in another order
                    torch.testing.assert_close(a, b)
            monkeypatch.undo()


@pytest.mark.parametrize("shape", [(3, CLASSES, 4, 5), (2, CLASSES, 9), (1, CLASSES, 6)])
def test_classes_in_the_second_dimension(shape: tuple[int, ...], monkeypatch) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).bfloat16()
    target = torch.randint(CLASSES, (shape[0], *shape[2:]), generator=g)
    target.view(-1)[::4] = -100
    probabilities = torch.rand(shape, generator=g)
    for target_or_probabilities in (target, probabilities):

        def f(x: Tensor, target: Tensor = target_or_probabilities) -> Tensor:
            return partita.cross_entropy(x, target, reduction="none", softcap=9.0)

        whole = train(f, x)
        for elements in (1, 2 * CLASSES, 9 * CLASSES):
            monkeypatch.setattr(rows, "ELEMENTS", elements)
            for a, b in zip(train(f, x), whole, strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()
            monkeypatch.undo()
    for dim in (0, -1):
        whole = train(lambda x, dim=dim: partita.log_softmax(x, dim).square(), x)
        monkeypatch.setattr(rows, "ELEMENTS", 100)
        for a, b in zip(
            train(lambda x, dim=dim: partita.log_softmax(x, dim).square(), x), whole, strict=True
        ):
            assert torch.equal(a, b) and a.stride() == b.stride()
        monkeypatch.undo()


def test_chunks_have_an_element_even_where_none_is_asked_for() -> None:
    """Hidden states of more numbers than a chunk may have are still computed one by one."""
    for total, size in ((0, 0), (3, 0), (5, 2), (4, 4)):
        parts = [range(total)[part] for part in rows.chunks(total, size)]
        assert [i for part in parts for i in part] == [*range(total)]
