"""Derivatives in several arguments, of arguments that depend on others, and of third order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import partita
from partita.testing import sample_labels

CLASSES = 5


def test_vmap_over_class_weights_is_refused() -> None:
    logits, labels = sample_labels(4, CLASSES)
    weight = torch.ones(2, CLASSES)
    with pytest.raises(
        NotImplementedError, match=r"^weight: class weights that differ over a vmapped dimension"
    ):
        torch.vmap(partita.cross_entropy, (None, None, 0))(logits, labels, weight)


def _expectation_of_own_scores(scores: Tensor) -> Tensor:
    return partita.Chain(scores, partita.dense_source(3)).expectation(scores.sin() * scores).sum()


INPUTS_OF_INPUTS = {
    "entropy": lambda x: partita.Chain(x, partita.dense_source(3)).entropy().sum(),
    "kl": lambda x: (
        partita.Chain(x, partita.dense_source(3))
        .kl(partita.Chain(x.cos(), partita.dense_source(3)))
        .sum()
    ),
    "expectation": _expectation_of_own_scores,
    "linear": lambda x: partita.linear_cross_entropy(
        x[0, 0], x[1, 0].sin() * x[0, 0].sum(), torch.tensor([0, 2, 1])
    ),
    "linear, rows": lambda x: partita.linear_cross_entropy(
        x[0, 0], x[0, 0].sin(), torch.tensor([0, 2, 1]), reduction="none"
    ).sum(),
}


@pytest.mark.parametrize("function", INPUTS_OF_INPUTS.values(), ids=INPUTS_OF_INPUTS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_one_input_may_be_a_function_of_another(
    function: Callable[[Tensor], Tensor], backend: str
) -> None:
    """Check that a derivative that will be differentiated again counts such a path once.

    A plain backward pass does so too; third derivatives must agree as well.
    """
    x = torch.randn(
        2, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    with partita.backend(backend):
        (plain,) = torch.autograd.grad(function(x), x)
        (with_graph,) = torch.autograd.grad(function(x), x, create_graph=True)
        torch.testing.assert_close(with_graph, plain, rtol=1e-10, atol=1e-12)
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


def test_third_derivatives_of_log_z() -> None:
    source = partita.dense_source(2)
    scores = torch.randn(
        2, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    ends = [
        torch.randn(
            1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
        ).requires_grad_()
        for i in (1, 2)
    ]

    def gradient(scores: Tensor, *ends: Tensor) -> Tensor:
        return torch.autograd.grad(
            partita.logz(scores, source, *ends).sum(), scores, create_graph=True
        )[0]

    assert torch.autograd.gradgradcheck(gradient, (scores, *ends))
    assert torch.autograd.gradgradcheck(gradient, (scores, *(end.detach() for end in ends)))


def test_second_derivatives_with_masked_logits() -> None:
    """Check that a class of probability 0 has no part in a second derivative."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    logits[0, 1] = -torch.inf
    target, free = torch.tensor([0, 1, 2, 3]), torch.isfinite(logits)
    for field in ("logprob", "logsumexp", "entropy"):
        x = logits.clone().requires_grad_()
        (first,) = torch.autograd.grad(
            getattr(partita.token_stats(x, target), field).sum(), x, create_graph=True
        )
        (second,) = torch.autograd.grad(first.square().sum(), x)
        assert second[free].isfinite().all() and (second[~free] == 0).all()
    hidden, matrix = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf])
    plain, with_graph = (
        torch.autograd.grad(
            partita.linear_token_stats(hidden, matrix, target, linear_bias=bias).entropy.sum(),
            hidden,
            create_graph=graph,
        )[0]
        for graph in (False, True)
    )
    torch.testing.assert_close(with_graph, plain)
