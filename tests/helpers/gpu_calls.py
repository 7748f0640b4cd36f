"""Calls that the C module replays on a GPU, forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import partita

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


def poison() -> None:
    """Leave NaN in the memory that the next allocations get."""
    for power in (12, 16, 20, 22):
        torch.full((2**power,), torch.nan, device=DEVICE)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for tensor, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0.0, atol=0.0, equal_nan=True)
