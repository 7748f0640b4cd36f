"""What does not count contributes nothing, and what is wrong with a row stays in that row."""

from contextlib import nullcontext

import pytest
import torch
from helpers.catalogue import (
    DIFFERENTIABLE,
    EVERY,
    all_samples,
    one_rank,
    outcome,
    places,
    same_bits,
)
from helpers.rows import INTERPRETING
from torch import Tensor

import partita
from partita.testing.samples import CALLS, Draw, Sample

FILLS = (torch.nan, torch.inf, -torch.inf, 1e38)


def filled(sample: Sample, masks: dict[str, Tensor], value: float) -> Sample:
    """Return the sample with a value in the masked elements of its inputs."""
    inputs = dict(sample.inputs)
    for name, mask in masks.items():
        x = inputs[name]
        value = min(value, torch.finfo(x.dtype).max)
        inputs[name] = x.detach().masked_fill(mask, value).requires_grad_(x.requires_grad)
    return Sample(sample.call, sample.name, inputs, sample.dtype)


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
@places
@pytest.mark.parametrize("name", [name for name, call in EVERY.items() if call.uncounted])
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


@pytest.mark.interpreted
@places
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.rows])
def test_a_nan_stays_in_its_row(name: str, backend: str, device: str) -> None:
    """It makes results of its row NaN, and reaches no bit of another row."""
    call, row = CALLS[name], 0
    sample = call.sample(Draw(device=device))
    wrong = []
    with partita.backend(backend):
        expected = outcome(sample)
        results = {f"result {i}": dim for i, dim in enumerate(call.rows)}
        for part, dim in call.batch.items():
            x = sample.inputs[part]
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                continue
            found = outcome(filled(sample, {part: row_mask(x, dim, row)}, torch.nan))
            gradients = {name: of for name, of in call.batch.items() if name in found}
            for other, of in {**results, **gradients}.items():
                if not same_bits(others(found[other], of, row), others(expected[other], of, row)):
                    wrong.append(f"{part} reaches {other} of another row")
                own = found[other].select(of, row)
                if other in results and own.is_floating_point() and not own.isnan().any():
                    wrong.append(f"{part} does not reach {other}")
    assert not wrong
