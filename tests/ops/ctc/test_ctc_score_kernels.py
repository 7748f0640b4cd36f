"""Priors and stars in the kernels of CTC against the reference, and the reference's derivatives."""

from typing import Any

import pytest
import torch
from helpers.ctc import (
    NEEDS_NUMBA,
    Batch,
    assert_alignment_matches,
    assert_matches_reference,
    batch_of,
    results,
)
from helpers.rows import INTERPRETING, kernel_devices
from torch.nn.functional import pad

import partita

BOTH = pytest.mark.parametrize("from_logits", [False, True])


def options_of(C: int, device: str, which: str = "both") -> dict[str, Any]:
    """Return priors, a star, or both, for C classes."""
    priors = torch.linspace(-6, -0.5, C).to(device)
    chosen = {} if which == "star" else {"label_priors": priors, "prior_scale": 0.3}
    return chosen if which == "priors" else {**chosen, "star": C + 3}


def starred(T: int, N: int, C: int, L: int, **options: Any) -> Batch:
    """Return a batch with stars, some of them beside each other and between equal labels."""
    x = batch_of(T, N, C, L, **options)
    x.targets[:, 1::3] = C + 3
    if L > 3:
        x.targets[0, :3] = torch.tensor([1, C + 3, 1])
        x.targets[0, 3:5] = C + 3
    x.input_lengths[0], x.target_lengths[0] = T, L
    return x


@kernel_devices
@BOTH
@pytest.mark.parametrize("which", ["star", "priors", "both"])
@pytest.mark.parametrize("C", [5, 300])
def test_against_the_specification(which: str, C: int, from_logits: bool, device: str) -> None:
    """Few classes have a table of emissions, and many have none; one target is empty."""
    x = starred(14, 3, C, 5, device=device, holes=0.05)
    x.target_lengths[1] = 0
    if which == "priors":
        x = x._replace(targets=x.targets % C)
    if not from_logits:
        x = x._replace(logits=x.logits.log_softmax(-1))
    options = options_of(C, device, which)
    assert_matches_reference(x, from_logits=from_logits, **options)
    assert_alignment_matches(x, from_logits, **options)


@kernel_devices
@pytest.mark.parametrize("C", [32, 64])
def test_several_chunks_of_targets(C: int, device: str) -> None:
    """The star is the first of the second group of classes, or one class too many for groups."""
    x = starred(60 if device != "cpu" else 42, 1, C, 34, device=device)
    x = x._replace(logits=x.logits * 0.1)
    assert_matches_reference(x, **options_of(C, device))
    assert_alignment_matches(x, **options_of(C, device))


@kernel_devices
@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, from_logits: bool, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates what it stores in bf16")
    x = starred(10, 2, 6, 4, device=device)
    x = x if from_logits else x._replace(logits=x.logits.log_softmax(-1))
    assert_matches_reference(x, dtype, from_logits, **options_of(6, device))


@kernel_devices
@pytest.mark.parametrize("C", [6, 300])
def test_targets_of_stars_alone(C: int, device: str) -> None:
    x = starred(9, 2, C, 3, device=device)
    x.targets.fill_(C + 3)
    assert_matches_reference(x, **options_of(C, device))
    assert_alignment_matches(x, **options_of(C, device))


@pytest.mark.usefixtures("unchecked")
@kernel_devices
def test_scores_beyond_the_range_of_emissions_use_fp64(device: str) -> None:
    """Priors of 1e8 are exact, and infinite ones of a class that no target has, if not checked."""
    options, x = options_of(6, device), starred(8, 4, 6, 3, device=device)
    x = x._replace(targets=torch.where(x.targets == 5, 1, x.targets))
    x.logits[:, 1] *= 1e7
    x.logits[:, 2, 2] = -1e9
    assert_matches_reference(x, **options)
    x.logits[:, 1] *= 1e-7
    for index, value in ((1, -1e8), (5, torch.inf), (5, -torch.inf)):
        priors = options["label_priors"].clone()
        priors[index] = value
        assert_matches_reference(x, **{**options, "label_priors": priors})


@pytest.mark.usefixtures("unchecked")
@kernel_devices
def test_invalid_labels_make_only_their_sequence_nan(device: str) -> None:
    for C in (6, 300):
        x, options = starred(9, 4, C, 3, device=device), options_of(C, device)
        x.target_lengths.fill_(3)
        x.targets[1, 0], x.targets[2, 2], x.targets[3, 0] = C, C + 4, -1
        for backend in ("triton", "reference"):
            losses, _, grad = results(x, backend, **options)
            assert losses.isnan().tolist() == [False, True, True, True]
            assert grad[:, 1:].isnan().all() and grad[:, 0].isfinite().all()
        with partita.backend("triton"):
            labels = partita.ctc_align(*x, from_logits=True, **options).labels
        assert (labels[1:] == -1).all() and (labels[0] == C + 3).any()


@pytest.mark.skipif(INTERPRETING, reason="no kernel is called here")
@NEEDS_NUMBA
@BOTH
@pytest.mark.parametrize("which", ["star", "priors", "both"])
def test_numba(which: str, from_logits: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, options = starred(30, 4, 7, 6, holes=0.05), options_of(7, "cpu", which)
        x.target_lengths[1] = 0
        x = x._replace(targets=x.targets % 7) if which == "priors" else x
        x = x if from_logits else x._replace(logits=x.logits.log_softmax(-1))
        found, truth = (
            results(x, b, dtype, from_logits, **options) for b in ("numba", "reference")
        )
        torch.testing.assert_close(found, truth)
        with partita.backend("numba"):
            aligned = partita.ctc_align(*x, from_logits=from_logits, **options)
        with partita.backend("reference"):
            expected = partita.ctc_align(*x, from_logits=from_logits, **options)
        torch.testing.assert_close(aligned[:4], expected[:4])


@pytest.mark.skipif(INTERPRETING, reason="no kernel is called here")
@pytest.mark.parametrize("backend", ["reference", pytest.param("numba", marks=NEEDS_NUMBA)])
@BOTH
def test_derivatives_are_those_of_scores_with_one_more_class(
    backend: str, from_logits: bool
) -> None:
    """First and second derivatives, against those of scores `[T, N, C + 1]` that autograd takes."""
    x, options = starred(7, 2, 4, 3, seed=3), options_of(4, "cpu")
    logits = x.logits.double().requires_grad_()
    moved = torch.where(x.targets == 7, 4, x.targets)

    def written_out(logits: torch.Tensor) -> torch.Tensor:
        scores = logits.log_softmax(-1) if from_logits else logits
        scores = pad(scores - 0.3 * options["label_priors"].double(), (0, 1))
        return partita.ctc_loss(scores, moved, *x[2:])

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return partita.ctc_loss(logits, *x[1:], from_logits=from_logits, **options)

    weights = torch.randn(logits.shape, dtype=torch.float64)
    found = []
    with partita.backend(backend):
        for function in (loss, written_out):
            value = function(logits)
            (first,) = torch.autograd.grad(value, logits, create_graph=True)
            (second,) = torch.autograd.grad((first * weights).sum(), logits)
            found.append((value.detach(), first.detach(), second))
        torch.testing.assert_close(*found)
        torch.testing.assert_close(torch.func.grad(loss)(logits.detach()), found[0][1])
        both = torch.func.vmap(loss)(logits.detach().expand(2, -1, -1, -1))
        torch.testing.assert_close(both, found[0][0].expand(2))


def test_priors_that_need_a_gradient_are_refused() -> None:
    logits, priors = torch.zeros(3, 1, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match="label_priors: expected a tensor that needs no gradient"):
        partita.ctc_loss(logits, torch.tensor([[1]]), [3], [1], label_priors=priors)
    with torch.no_grad():
        partita.ctc_loss(logits, torch.tensor([[1]]), [3], [1], label_priors=priors)
