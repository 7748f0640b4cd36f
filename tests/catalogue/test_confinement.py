"""What does not count contributes nothing, and what is wrong with a row stays in that row."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers.catalogue import (
    DIFFERENTIABLE,
    EVERY,
    all_samples,
    in_places,
    is_score,
    one_rank,
    outcome,
    same_bits,
)
from helpers.rows import INTERPRETING
from torch import Tensor

import partita
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw, Sample

FILLS = (torch.nan, torch.inf, -torch.inf, 1e38)


def filled(sample: Sample, masks: dict[str, Tensor], value: float) -> Sample:
    """Return the sample with a value in the masked elements of its inputs."""
    inputs = dict(sample.inputs)
    for name, mask in masks.items():
        x = inputs[name]
        value = min(value, torch.finfo(x.dtype).max)
        inputs[name] = x.detach().masked_fill(mask, value).requires_grad_(x.requires_grad)
    return replace(sample, inputs=inputs)


def second_derivatives(sample: Sample) -> dict[str, Tensor]:
    """Return the gradients of the sum of the squares of the gradients."""
    leaves = sample.leaves
    total = sum(
        torch.where(r.isfinite(), r, 0).square().sum() for r in sample.run() if r.requires_grad
    )
    first = torch.autograd.grad(
        total, list(leaves.values()), create_graph=True, materialize_grads=True
    )
    total = sum(gradient.square().sum() for gradient in first)
    second = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, second, strict=True))


@pytest.mark.interpreted
@in_places(name for name, call in EVERY.items() if call.uncounted)
def test_what_does_not_count_contributes_nothing(name: str, backend: str, device: str) -> None:
    """It reaches no bit of a result or of a gradient, which is 0 there, whatever it holds."""
    wrong = []
    ranks = nullcontext() if name in CALLS else one_rank(device)
    with ranks, partita.backend(backend):
        if name in DIFFERENTIABLE and CALLS[name].second_derivatives and not INTERPRETING:
            sample = CALLS[name].sample(Draw(device=device))
            masks = sample.call.uncounted(sample.inputs)
            expected, found = (
                second_derivatives(filled(sample, masks, x)) for x in (0.0, FILLS[0])
            )
            wrong += [
                f"second derivatives in {x}" for x in found if not same_bits(found[x], expected[x])
            ]
        for sample in all_samples(name, Draw(device=device)):
            masks = sample.call.uncounted(sample.inputs)
            masks = {name: mask for name, mask in masks.items() if mask.any()}
            if not masks:
                continue
            expected = outcome(filled(sample, masks, 0.0))
            for value in FILLS[:: 1 if device == "cpu" and not INTERPRETING else 3]:
                found = outcome(filled(sample, masks, value))
                for part, truth in expected.items():
                    if not same_bits(found[part], truth):
                        wrong.append(f"{sample}: {part} depends on {value}")
                for part in masks.keys() & found.keys():
                    if (found[part][masks[part]] != 0).any():
                        wrong.append(f"{sample}: gradient of {part} with {value}")
    assert not wrong


def row_mask(x: Tensor, dim: int, row: int) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask.select(dim, row).fill_(True)
    return mask


def others(x: Tensor, dim: int, row: int) -> Tensor:
    """Return all rows but one."""
    return torch.cat([x.narrow(dim, 0, row), x.narrow(dim, row + 1, x.shape[dim] - row - 1)], dim)


# Options under which rows stay rows.
OPTIONS = ("by token", "by sequence", "priors", "star", "hat", "all options", "posterior", "beam")


def samples_of_rows(name: str, device: str) -> list[Sample]:
    call, draw = CALLS[name], Draw(device=device)
    options = [option for option in OPTIONS if option in call.options and not INTERPRETING]
    return [call.sample(draw), *(call.sample(draw, option) for option in options)]


def reached(
    sample: Sample, found: dict[str, Tensor], expected: dict[str, Tensor], row: int
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield what a change of a row reaches in others, then each result and gradient of the row."""
    dims = {f"result {i}": dim for i, dim in enumerate(sample.call.rows)}
    dims |= {part: dim for part, dim in sample.call.batch.items() if part in found}
    for part, dim in dims.items():
        if not same_bits(others(found[part], dim, row), others(expected[part], dim, row)):
            yield part, None
        yield part, found[part].select(dim, row)


@pytest.mark.interpreted
@in_places(name for name, call in CALLS.items() if call.rows)
def test_a_nan_stays_in_its_row(name: str, backend: str, device: str) -> None:
    """It makes results of its row NaN, and reaches no bit of another row."""
    row, wrong = 0, []
    with partita.backend(backend):
        for sample in samples_of_rows(name, device):
            expected = outcome(sample)
            for part, dim in sample.call.batch.items():
                if not is_score(sample.inputs[part]):
                    continue
                mask = row_mask(sample.inputs[part], dim, row)
                found = outcome(filled(sample, {part: mask}, torch.nan))
                for other, own in reached(sample, found, expected, row):
                    if own is None:
                        wrong.append(f"{sample}: {part} reaches {other} of another row")
                    elif other.startswith("result") and is_score(own) and not own.isnan().any():
                        wrong.append(f"{sample}: {part} does not reach {other}")
    assert not wrong


# Chains of one token or more.
OF_TOKENS = ("linear_chain", "LinearChain", "semi_markov", "SemiMarkov")
# Inputs whose values are checked; others name paths, in which -1 is allowed.
CHECKED = {
    *("lengths", "input_lengths", "logit_lengths", "target_lengths"),
    *("targets", "target", "ids"),
}


def outcome_of_all(sample: Sample) -> dict[str, Tensor]:
    """Return the results, and the gradients of the sum of all of their elements, NaN or not."""
    results = sample.run()
    found = {f"result {i}": result.detach() for i, result in enumerate(results)}
    if wanted := [result for result in results if result.requires_grad]:
        ones, leaves = list(map(torch.ones_like, wanted)), list(sample.leaves.values())
        grads = torch.autograd.grad(wanted, leaves, ones, materialize_grads=True)
        found |= zip(sample.leaves, grads, strict=True)
    return found


def is_valid(name: str, part: str, x: Tensor) -> bool:
    """Return whether a result or gradient of a row does not say that the row is invalid."""
    if name == "ctc_crf_decode":  # which finds no base there
        return False
    if is_score(x):
        # Gradients of other methods are sums of several.
        return ("." not in name or part.startswith("result")) and not x.isnan().all()
    if not name.endswith(("viterbi", "sample", "align", "nbest")):
        return False
    return bool(x.any()) if x.dtype == torch.bool else bool((x != -1).any())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.interpreted
@in_places(name for name, call in CALLS.items() if call.rows and CHECKED & set(call.batch))
def test_an_integer_out_of_range_stays_in_its_row(name: str, backend: str, device: str) -> None:
    """Where nothing is checked, results and gradients of its row are NaN, or there is no path."""
    row, wrong = 0, []
    with partita.backend(backend), poisoned_memory():
        for sample in samples_of_rows(name, device):
            expected = outcome_of_all(sample)
            for part in CHECKED & set(sample.call.batch):
                x = sample.inputs[part]
                lowest = (0, -(2**40)) if name.startswith(OF_TOKENS) else (-(2**40),)
                for value in (int(x.max()) + 1, *lowest):
                    invalid = x.clone()
                    invalid[row] = value
                    inputs = {**sample.inputs, part: invalid}
                    found = outcome_of_all(replace(sample, inputs=inputs))
                    for other, own in reached(sample, found, expected, row):
                        if own is None:
                            wrong.append(f"{sample}: {part} {value} reaches {other} of another row")
                        elif is_valid(name, other, own):
                            wrong.append(f"{sample}: {part} {value} does not reach {other}")
    assert not wrong
