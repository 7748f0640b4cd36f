"""Statistics over kept classes from hidden states, against those of the logits."""

from typing import Any

import pytest
import torch
from helpers.memory import extra_memory
from helpers.rows import devices
from torch import Tensor

import partita
from partita.ops.linear_heads.truncated import SEARCH_NUMBERS

CLASSES, ROWS = 700, (2, 19)
RULES: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 9},
    "top-p and a soft-cap": {"top_p": 0.9, "softcap": 3.0},
    "a dropped target": {"top_k": 9, "missing": "inf"},
    "rules of each row": {
        "top_k": torch.arange(38).view(ROWS),
        "top_p": 0.8,
        "temperature": torch.linspace(0.5, 2.0, 38).view(ROWS),
    },
}


def head(dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    shapes = ((*ROWS, 24), (CLASSES, 24), (CLASSES,))
    found = [torch.randn(shape, generator=draw, dtype=torch.float64) / 2 for shape in shapes]
    target = torch.randint(CLASSES, ROWS, generator=draw)
    target[0, 3] = -100
    return *(x.to(device, dtype).requires_grad_() for x in found), target.to(device)


def results(function: Any, inputs: tuple[Tensor, ...], options: Any) -> tuple[Tensor, ...]:
    """Return the statistics, and the gradients of a sum with weights."""
    *leaves, _ = inputs
    options = {
        k: v.to(inputs[0].device) if isinstance(v, Tensor) else v for k, v in options.items()
    }
    stats = function(*inputs, **options)
    loss = sum(
        (i * field.masked_fill(field.isinf(), 0)).mean() for i, field in enumerate(stats[:4], 1)
    )
    return *stats, *torch.autograd.grad(loss, leaves)


@devices
@pytest.mark.parametrize(
    "budget", [60_000, 4 * CLASSES * 38 * 8, None], ids=["lean", "fast", "small"]
)
@pytest.mark.parametrize("name", RULES)
def test_results_are_those_of_the_logits(name: str, budget: int | None, device: str) -> None:
    inputs = head(torch.float64, device)
    ours = results(
        lambda x, w, b, t, **rules: partita.linear_truncated_stats(
            x, w, t, linear_bias=b, memory_budget=budget, **rules
        ),
        inputs,
        RULES[name],
    )
    right = results(
        lambda x, w, b, t, **rules: partita.truncated_stats(
            torch.nn.functional.linear(x, w, b), t, **rules
        ),
        inputs,
        RULES[name],
    )
    for found, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@devices
def test_chunks_of_half_types_keep_what_all_logits_keep(device: str) -> None:
    x, w, _, target = (each.detach() for each in head(torch.bfloat16, device))
    chunks = partita.linear_truncated_stats(x, w, target, top_k=20, memory_budget=1)
    whole = partita.truncated_stats(x @ w.T, target, top_k=20)
    # Products of other sizes may round a few logits in another way.
    assert (chunks.kept == whole.kept).double().mean() > 0.9
    torch.testing.assert_close(chunks.kept_logsumexp, whole.kept_logsumexp, rtol=0, atol=2e-2)


@devices
def test_padding_may_hold_nan(device: str) -> None:
    x, w, _, target = head(torch.float32, device)
    with torch.no_grad():
        x[0, 3] = torch.nan
    stats = partita.linear_truncated_stats(x, w, target, top_p=0.9, memory_budget=60_000)
    stats.logprob.sum().backward()
    assert stats.logprob[0, 3] == 0
    assert x.grad is not None and w.grad is not None
    assert x.grad[0, 3].eq(0).all() and x.grad.isfinite().all() and w.grad.isfinite().all()


@devices
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_rules_of_each_row_in_the_batch_invariant_mode(
    logits_dtype: torch.dtype | None, device: str
) -> None:
    """Blocks of tokens are filled with rows whose rules are valid and do not count."""
    x, w, _, target = (each.detach() for each in head(torch.bfloat16, device))
    rules = {"top_k": torch.arange(38, device=device).view(ROWS), "temperature": 0.7}
    rules["top_p"] = torch.linspace(0.0, 1.0, 38, device=device).view(ROWS)

    def statistics(index: int | slice) -> partita.TruncatedStats:
        of_rows = {k: v[index] if isinstance(v, Tensor) else v for k, v in rules.items()}
        with partita.batch_invariant():
            return partita.linear_truncated_stats(
                x[index], w, target[index], logits_dtype=logits_dtype, **of_rows
            )

    both, alone = statistics(slice(None)), statistics(1)
    logits = x.float() @ w.float().T
    expected = partita.truncated_stats(logits, target, **rules)
    assert all(torch.equal(a[1], b) for a, b in zip(both, alone, strict=True))
    torch.testing.assert_close(both.logsumexp, expected.logsumexp, rtol=0, atol=2e-2)
    if logits_dtype is not None:
        assert torch.equal(both.kept, expected.kept)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_search_is_part_of_the_budget(dtype: torch.dtype) -> None:
    x = torch.randn(1024, 64, device="cuda", dtype=dtype)
    w = torch.randn(40_000, 64, device="cuda", dtype=dtype)
    budget = 512 * (40_000 * dtype.itemsize + 4 * SEARCH_NUMBERS)  # four tiles of tokens
    extra = extra_memory(
        lambda: partita.linear_truncated_stats(x, w, top_p=0.9, memory_budget=budget)
    )
    assert extra <= budget + 2**20  # for the results
