"""Derivatives in several arguments, of arguments that depend on others, and of third order."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.rows import class_weights, devices, leaf, plain_cross_entropy, targets_for
from helpers.stats import plain_token_stats
from torch import Tensor

import partita
from partita.testing import sample_labels, sample_rows

CLASSES = 5
ALL = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}
OPTIONS = {
    "none": {"reduction": "none"},
    "mean": {},
    "sum": {"reduction": "sum"},
    "none, all": {"reduction": "none", **ALL},
    "mean, all": ALL,
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def token_sum(function: Callable, logits: Tensor, target: Tensor) -> Tensor:
    """Return a sum of the three differentiable fields, each with its own factor."""
    return sum(
        factor * field
        for factor, field in zip((1.0, 0.3, -0.7), function(logits, target)[:3], strict=True)
    )


LOSSES = {
    name: (lambda x, t, options=options: partita.cross_entropy(x, t, **options))
    for name, options in OPTIONS.items()
}
LOSSES["token_stats"] = lambda x, t: token_sum(partita.token_stats, x, t)


@devices
@each_option
def test_first_derivatives_in_probabilities_and_weights(options: dict, device: str) -> None:
    x = leaf(3, CLASSES, dtype=torch.float64, device=device)
    target = targets_for(x.detach(), "probabilities").requires_grad_()
    weight = class_weights(CLASSES, torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *t: partita.cross_entropy(*t, **options), (x, target, weight)
    )


@devices
@each_option
def test_second_derivatives_in_probabilities_and_weights(options: dict, device: str) -> None:
    x = leaf(3, CLASSES, dtype=torch.float64, device=device)
    target = targets_for(x.detach(), "probabilities").requires_grad_()
    weight = (class_weights(CLASSES, torch.float64, device) + 0.1).requires_grad_()
    inputs = (x, target, weight)
    second = []
    for function in (partita.cross_entropy, plain_cross_entropy):
        first = torch.autograd.grad(function(*inputs, **options).sum(), inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    torch.testing.assert_close(*second)


PAIRS = {
    name: (LOSSES[name], lambda x, t, options=options: plain_cross_entropy(x, t, **options))
    for name, options in OPTIONS.items()
}
PAIRS["token_stats"] = (LOSSES["token_stats"], lambda x, t: token_sum(plain_token_stats, x, t))
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("in_dims", [(0, 0), (1, 0), (2, 1), (0, None), (None, 0)], ids=str)
@pairs
def test_vmap_over_every_argument(
    pair: tuple[Callable, Callable], in_dims: tuple[int | None, int | None], device: str
) -> None:
    def laid_out(t: Tensor, at: int | None) -> Tensor:
        return t[0] if at is None else t.movedim(0, at)

    x = sample_rows(3, 4 * CLASSES, device=device).reshape(3, 4, CLASSES)
    target = torch.stack(
        [targets_for(part, "labels", ignored=-100, seed=seed) for seed, part in enumerate(x)]
    )
    arguments = [laid_out(t, at) for t, at in zip((x, target), in_dims, strict=True)]
    pick = [
        t.unbind(at) if at is not None else [t] * 3
        for t, at in zip(arguments, in_dims, strict=True)
    ]
    ours, theirs = pair
    mapped = torch.vmap(ours, in_dims)(*arguments)
    torch.testing.assert_close(
        mapped, torch.stack([theirs(*each) for each in zip(*pick, strict=True)])
    )
    each_gradient = torch.vmap(torch.func.grad(lambda x, t: ours(x, t).sum()), in_dims)(*arguments)
    expected = [
        torch.func.grad(lambda x, t: theirs(x, t).sum())(*each) for each in zip(*pick, strict=True)
    ]
    torch.testing.assert_close(each_gradient, torch.stack(expected))


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize(
    "in_dims", [(0, 0, None), (0, None, None), (None, 0, None), (1, 2, None)], ids=str
)
def test_vmap_over_probabilities(in_dims: tuple[int | None, ...], device: str) -> None:
    x = sample_rows(3, 3 * 3, device=device).reshape(3, 3, 3)
    target = x.softmax(-1)
    weight = class_weights(3, torch.float32, device)
    arguments = [
        t if at is not None or t is weight else t[0]
        for t, at in zip((x, target, weight), in_dims, strict=True)
    ]
    mapped = torch.vmap(partita.cross_entropy, in_dims)(*arguments)
    torch.testing.assert_close(mapped, torch.vmap(F.cross_entropy, in_dims)(*arguments))


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
        3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
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


def test_there_is_no_forward_mode() -> None:
    with torch.autograd.forward_ad.dual_level():
        scores = torch.autograd.forward_ad.make_dual(
            torch.zeros(2, 1, 2, 2), torch.ones(2, 1, 2, 2)
        )
        for call in (
            lambda: partita.Chain(scores, partita.dense_source(2)).forward_scores(),
            lambda: partita.Chain(scores, partita.dense_source(2)).backward_scores(),
            lambda: partita.cross_entropy(scores[0, 0], torch.tensor([0, 1])),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                call()
