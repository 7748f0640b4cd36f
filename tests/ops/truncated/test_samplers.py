"""The kept sets are those of vLLM's and of transformers' samplers, in their orders.

Each row has numbers of its own. Every share and every ratio lies halfway between two classes, so
that no rounding decides, except where a test says otherwise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.catalogue import BACKEND
from helpers.rows import devices
from torch import Tensor

import partita

INF = torch.inf
LEAST = 1e-3  # probability of the last class that top-p keeps; sums of fp32 are exact to 1e-5


class Rules(NamedTuple):
    """The numbers of each row, `[M]`, int64 and fp32 as samplers have them."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def columns(self) -> "Rules":
        return Rules(*(numbers[:, None] for numbers in self))


Sampler = Callable[[Tensor, Rules], Tensor]


def top_p_of_vllm(x: Tensor, top_p: Tensor) -> Tensor:
    """Drop the least probable classes whose sum is at most 1 - p, but not the greatest class."""
    ascending, index = x.sort(-1)
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[:, -1] = False
    return x.masked_fill(dropped.scatter(-1, index, dropped), -INF)


def top_k_of_vllm(x: Tensor, top_k: Tensor) -> Tensor:
    """Drop what is less than the k-th greatest number."""
    return x.masked_fill(x < x.sort(-1).values.gather(-1, x.shape[-1] - top_k), -INF)


def min_p_of_vllm(x: Tensor, min_p: Tensor) -> Tensor:
    """Drop the probabilities below min_p times the greatest one."""
    p = x.softmax(-1)
    return x.masked_fill(p < min_p * p.amax(-1, keepdim=True), -INF)


def vllm(logits: Tensor, rules: Rules) -> Tensor:
    """Return the kept classes of vLLM 0.33 where it has no Triton.

    `Sampler.sample` in `v1/sample/sampler.py`, `MinPLogitsProcessor` in
    `v1/sample/logits_processor/builtin.py`, `apply_top_k_top_p_pytorch` in
    `v1/sample/ops/topk_topp_sampler.py`.
    """
    temperature, top_k, top_p, min_p = rules.columns()
    x = min_p_of_vllm(logits.float() / temperature, min_p)
    return top_p_of_vllm(top_k_of_vllm(x, top_k), top_p) > -INF


def vllm_kernel(logits: Tensor, rules: Rules) -> Tensor:
    """Return the kept classes of vLLM 0.33 on a GPU, where fewer of those that tie are kept.

    `v1/sample/ops/topk_topp_triton.py` and `v1/worker/gpu/sample/min_p.py`: exactly k classes, and
    no more classes than it takes for the sum to reach p; the first of those that tie.
    """
    temperature, top_k, top_p, min_p = rules.columns()
    x = logits.float() / temperature
    x = x.masked_fill(x < x.amax(-1, keepdim=True) + min_p.log(), -INF)
    ordered, index = x.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(x.shape[-1]) >= top_k, -INF)
    p = ordered.softmax(-1)
    kept = ((p.cumsum(-1) - p < top_p) | (top_p == 1)) & (ordered > -INF)
    return kept.scatter(-1, index, kept)


def transformers(logits: Tensor, rules: Rules) -> Tensor:
    """Return the kept classes of transformers 5.24.

    `GenerationMixin._get_logits_processor` in `generation/utils.py` has temperature, top-k, top-p
    and min-p in this order. Each rule has the formula of vLLM's.
    """
    temperature, top_k, top_p, min_p = rules.columns()
    x = top_p_of_vllm(top_k_of_vllm(logits.float() / temperature, top_k), top_p)
    return min_p_of_vllm(x, min_p) > -INF


def transformers_itself(logits: Tensor, rules: Rules) -> Tensor:
    """Return what transformers' own warpers keep; they take one number for all rows."""
    module = pytest.importorskip("transformers.generation.logits_process", exc_type=ImportError)
    names = ("Temperature", "TopK", "TopP", "MinP")
    warpers = [getattr(module, f"{name}LogitsWarper") for name in names]
    kept, ids = torch.zeros_like(logits, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    for row in range(len(logits)):
        x = logits[row : row + 1].float()
        for warper, numbers in zip(warpers, rules, strict=True):
            x = warper(numbers[row].item())(ids, x)
        kept[row] = x[0] > -INF
    return kept


def vllm_itself(logits: Tensor, rules: Rules) -> Tensor:
    """Return what vLLM's own function keeps, after min-p."""
    module = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler", exc_type=ImportError)
    x = min_p_of_vllm(logits.float() / rules.temperature[:, None], rules.min_p[:, None])
    return module.apply_top_k_top_p_pytorch(x, rules.top_k, rules.top_p) > -INF


SAMPLERS: dict[str, tuple[Sampler, str]] = {
    "vllm": (vllm, "vllm"),
    "vllm-kernel": (vllm_kernel, "vllm"),
    "vllm-itself": (vllm_itself, "vllm"),
    "transformers": (transformers, "transformers"),
    "transformers-itself": (transformers_itself, "transformers"),
}
samplers = pytest.mark.parametrize(("sampler", "order"), SAMPLERS.values(), ids=SAMPLERS)
sizes = pytest.mark.parametrize(
    ("number", "classes"),
    [pytest.param(24, 300, marks=pytest.mark.interpreted), (100, 7), (200, 1000), (4, 128_256)],
)


def drawn_logits(number: int, classes: int, dtype: torch.dtype) -> Tensor:
    """Return logits that are distinct in fp32, and have many ties in bf16."""
    generator = torch.Generator().manual_seed(classes)
    logits = 2.6 * torch.randn(number, classes, generator=generator)
    if dtype == torch.float32:
        # No two of them are rounded to one number when they are divided by a temperature.
        steps = torch.linspace(-12, 8, classes)
        return steps[torch.rand(number, classes, generator=generator).argsort(-1)]
    return logits.round().to(dtype)


def drawn_rules(logits: Tensor, order: str) -> Rules:
    """Return numbers for each row; every rule is switched off in some rows."""
    number, classes = logits.shape
    generator = torch.Generator().manual_seed(number)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(number, generator=generator, dtype=torch.float64)

    def some(values: Tensor, switched_off: float) -> Tensor:
        return torch.where(uniform(0, 1) < 0.25, switched_off, values)

    def at(values: Tensor, place: Tensor) -> Tensor:
        return values.gather(-1, place[:, None]).squeeze(-1)

    temperature = some(uniform(0.3, 2.0), 1.0).float()
    # As many small k as great ones.
    top_k = some((uniform(0, 1) * torch.tensor(classes).log()).exp(), classes).long()
    x = (logits.double() / temperature[:, None].double()).sort(-1, descending=True).values
    place = torch.arange(classes)

    # Halfway between two unequal classes, neither of which underflows.
    steps = (x.diff(dim=-1) < 0) & (x[:, 1:] > x[:, :1] - 40)
    last = (uniform(0, 1) * steps.sum(-1)).long()
    last = (steps.cumsum(-1) <= last[:, None]).sum(-1).clamp(max=classes - 2)
    min_p = some(((at(x, last) + at(x, last + 1)) / 2 - x[:, 0]).exp(), 0.0)

    kept = x >= at(x, top_k - 1)[:, None]
    if order == "vllm":
        kept &= x >= x[:, :1] + min_p.log()[:, None]
    p = x.masked_fill(~kept, -INF).softmax(-1)
    last = (uniform(0, 1) * (p > LEAST).sum(-1)).long()
    share = torch.where(place < last[:, None], p, 0).sum(-1) + at(p, last) / 2
    return Rules(temperature, top_k, some(share, 1.0).float(), min_p.float())


def found_sets(
    logits: Tensor, rules: Rules, order: str, device: str
) -> tuple[Tensor, partita.TruncatedStats, Tensor]:
    """Return which classes our rules keep, and the statistics of some targets.

    The derivative of `kept_logsumexp` is not 0 where a class is kept.
    """
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(logits.shape[1], (len(logits),), generator=generator)
    # Half of the targets are likely ones.
    best = logits.topk(min(5, logits.shape[1])).indices[:, -1]
    target = torch.where(torch.arange(len(logits)) % 2 == 0, best, target)
    options: dict[str, Any] = {
        name: numbers.to(device) for name, numbers in rules._asdict().items()
    }
    x = logits.to(device).requires_grad_()
    with partita.backend(BACKEND):
        stats = partita.truncated_stats(x, target.to(device), order=order, **options)
        alone = partita.truncated_stats(x, order=order, **options)
        (gradient,) = torch.autograd.grad(alone.kept_logsumexp.sum(), x)
    kept = gradient.cpu() != 0
    assert torch.equal(alone.kept.cpu(), kept.sum(-1))
    return kept, stats, target


def check(
    stats: partita.TruncatedStats, logits: Tensor, temperature: Tensor, target: Tensor, kept: Tensor
) -> None:
    """Compare statistics with those of the given sets, in fp64."""
    x = logits.double() / temperature[:, None].double()
    of_target = target.unsqueeze(-1)
    with_target = kept.scatter(-1, of_target, True)
    logp = x.masked_fill(~with_target, -INF).log_softmax(-1)
    expected = (
        logp.gather(-1, of_target).squeeze(-1),
        x.logsumexp(-1),
        x.masked_fill(~with_target, -INF).logsumexp(-1),
        -(logp.exp() * logp.masked_fill(logp == -INF, 0)).sum(-1),
    )
    for ours, right in zip(stats[:4], expected, strict=True):
        torch.testing.assert_close(ours.double().cpu(), right, rtol=2e-6, atol=1e-5)
    assert torch.equal(stats.kept.cpu(), with_target.sum(-1))
    assert torch.equal(stats.in_set.cpu(), kept.gather(-1, of_target).squeeze(-1))


@devices
@sizes
@samplers
def test_sets_of_distinct_logits(
    sampler: Sampler, order: str, number: int, classes: int, device: str
) -> None:
    logits = drawn_logits(number, classes, torch.float32)
    assert (logits.sort(-1).values.diff(dim=-1) > 0).all()
    rules = drawn_rules(logits, order)
    theirs = sampler(logits, rules)
    kept, stats, target = found_sets(logits, rules, order, device)
    assert torch.equal(kept, theirs)
    check(stats, logits, rules.temperature, target, theirs)


@devices
@sizes
@samplers
def test_sets_of_logits_with_ties(
    sampler: Sampler, order: str, number: int, classes: int, device: str
) -> None:
    """Our sets contain theirs, and differ only at the threshold."""
    logits = drawn_logits(number, classes, torch.bfloat16)
    rules = drawn_rules(logits, order)
    theirs = sampler(logits, rules)
    kept, stats, target = found_sets(logits, rules, order, device)
    assert not (theirs & ~kept).any()
    is_tied = (kept != theirs).any(-1)
    assert is_tied.float().mean() > 0.1, "too few rows have ties at the threshold"
    at_threshold = kept == (logits >= logits.masked_fill(~theirs, INF).amin(-1, keepdim=True))
    if sampler is vllm_kernel:
        # Its k classes have a smaller sum than ours, so top-p may keep fewer of them.
        at_threshold[(rules.top_k < classes) & (rules.top_p < 1)] = True
    assert at_threshold.all()
    check(stats, logits, rules.temperature, target, kept)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize(("sampler", "order"), [(vllm, "vllm"), (transformers, "transformers")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 7, "top_p": 0.8},
        {"min_p": 0.1, "top_p": 0.6},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"top_k": 10_000, "temperature": 1.5},
    ],
    ids=str,
)
def test_one_number_for_all_rows(
    options: dict[str, Any], sampler: Sampler, order: str, device: str
) -> None:
    number, classes = 24, 40
    logits, target = drawn_logits(number, classes, torch.float32), torch.arange(number)
    numbers = {"temperature": 1.0, "top_k": classes, "top_p": 1.0, "min_p": 0.0, **options}
    rules = Rules(**{name: torch.full((number,), value) for name, value in numbers.items()})
    kept = sampler(logits, rules._replace(top_k=rules.top_k.clamp(max=classes)))
    with partita.backend(BACKEND):
        stats = partita.truncated_stats(
            logits.to(device), target.to(device), order=order, **options
        )
    check(stats, logits, rules.temperature, target, kept)
