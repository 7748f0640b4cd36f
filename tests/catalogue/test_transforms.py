"""Batched, functional and second derivatives of every call, and lazy tensors.

Each result is compared with one plain backward pass for each gradient, in fp64.
"""

from collections.abc import Callable

import pytest
import torch
from helpers.catalogue import BACKEND, DIFFERENTIABLE, VARIANTS, in_places, is_score, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import partita
from partita.testing.samples import CALLS, Draw, Sample

EXACT = {"rtol": 1e-9, "atol": 1e-11}
TWICE = [name for name, (call, _) in VARIANTS.items() if CALLS[call].second_derivatives]
SEARCHES = [name for name in CALLS if name not in DIFFERENTIABLE and not name.endswith("sample")]
each_call = in_places(VARIANTS, indirect=["backend"])


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest) -> object:
    chosen = getattr(request, "param", BACKEND)
    with partita.backend(chosen):
        yield chosen


class Problem:
    """A function of the leaves of a sample, whose result is one vector."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.names = sample, list(sample.leaves)
        self.leaves = [leaf.detach() for leaf in sample.leaves.values()]
        size = self(*self.leaves).shape
        generator = torch.Generator().manual_seed(2)
        upstream = torch.randn(3, *size, generator=generator, dtype=torch.float64)
        self.upstream = upstream.to(self.leaves[0].device)
        self.directions = [
            torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.device)
            for leaf in self.leaves
        ]

    def __call__(self, *leaves: Tensor) -> Tensor:
        results = self.sample.run(**dict(zip(self.names, leaves, strict=True)))
        return torch.cat([r.flatten() for r in results if r.is_floating_point()])

    def gradients(self, leaves: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of a plain backward pass."""
        copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(self(*copies), copies, upstream, materialize_grads=True)


def problem(name: str, device: str) -> Problem:
    call, option = VARIANTS[name]
    return Problem(CALLS[call].sample(Draw(torch.float64, device=device), option))


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found, expected, **EXACT)


@each_call
def test_batched_gradients(name: str, device: str) -> None:
    if "in place" in name:
        pytest.skip("one buffer cannot hold the gradients of a batch")
    of = problem(name, device)
    expected = tuple(
        map(torch.stack, zip(*(of.gradients(of.leaves, up) for up in of.upstream), strict=True))
    )
    leaves = [leaf.clone().requires_grad_() for leaf in of.leaves]
    for graph in (False, True)[: 1 + (name in TWICE)]:
        found = torch.autograd.grad(
            of(*leaves),
            leaves,
            of.upstream,
            is_grads_batched=True,
            create_graph=graph,
            materialize_grads=True,
        )
        assert_close(found, expected)


@each_call
def test_functional_gradients(name: str, device: str) -> None:
    of = problem(name, device)
    expected = of.gradients(of.leaves, of.upstream[0])
    value, vjp = torch.func.vjp(of, *of.leaves)
    assert_close((value,), (of(*of.leaves),))
    with torch.no_grad():
        assert_close(vjp(of.upstream[0]), expected)
    if "in place" in name:
        return
    assert_close(vjp(of.upstream[0]), expected)
    every = tuple(range(len(of.leaves)))
    found = torch.func.grad(lambda *leaves: (of(*leaves) * of.upstream[0]).sum(), every)(*of.leaves)
    assert_close(found, expected)
    (jacobian,) = torch.func.jacrev(of, (0,))(*of.leaves)
    product = torch.tensordot(of.upstream[0], jacobian, 1)
    assert_close((product,), expected[:1])


@each_call
def test_a_batch_of_arguments(name: str, device: str) -> None:
    if name == "cross_entropy, probabilities, all options":
        pytest.skip("class weights that differ over a batch are refused")
    of = problem(name, device)
    batch = [torch.stack([x, -x, 0.5 * x], min(1, x.ndim)) for x in of.leaves]
    dims = tuple(min(1, x.ndim) for x in of.leaves)
    rows = list(zip(*(x.unbind(d) for x, d in zip(batch, dims, strict=True)), strict=True))
    values = torch.vmap(of, dims)(*batch)
    assert_close((values,), (torch.stack([of(*row) for row in rows]),))
    if "in place" in name:
        return

    def gradients(upstream: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        every = tuple(range(len(leaves)))
        return torch.func.grad(lambda *xs: (of(*xs) * upstream).sum(), every)(*leaves)

    found = torch.vmap(gradients, (0, *dims), dims)(of.upstream, *batch)
    each = [of.gradients(list(row), up) for row, up in zip(rows, of.upstream, strict=True)]
    expected = tuple(map(torch.stack, zip(*each, strict=True), dims))
    assert_close(found, expected)


@in_places((name for name in CALLS if not name.endswith("sample")), indirect=["backend"])
def test_a_batch_of_all_tensors(name: str, device: str) -> None:
    """Labels, lengths and masks may be batched too."""
    draws = [Draw(torch.float64, device=device, seed=seed, grad=False) for seed in (0, 1)]
    samples = [CALLS[name].sample(draw) for draw in draws]
    trees = [tree_flatten(sample.inputs) for sample in samples]
    which = [i for i, x in enumerate(trees[0][0]) if isinstance(x, Tensor)]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves, structure = list(trees[0][0]), trees[0][1]
        for i, x in zip(which, tensors, strict=True):
            leaves[i] = x
        return samples[0].run(**tree_unflatten(leaves, structure))

    batch = [torch.stack([leaves[i] for leaves, _ in trees]) for i in which]
    found = torch.vmap(run)(*batch)
    for result, *expected in zip(found, *(sample.run() for sample in samples), strict=True):
        torch.testing.assert_close(result, torch.stack(expected), **EXACT)


@in_places(SEARCHES, indirect=["backend"])
def test_searches_take_a_batch_of_arguments(name: str, device: str) -> None:
    sample = CALLS[name].sample(Draw(torch.float64, device=device))
    names = [part for part, x in sample.inputs.items() if is_score(x)]
    batch = {part: torch.stack([sample.inputs[part], -sample.inputs[part]]) for part in names}

    def run(*scores: Tensor) -> tuple[Tensor, ...]:
        return sample.run(**dict(zip(names, scores, strict=True)))

    found = torch.vmap(run)(*batch.values())
    each = [run(*scores) for scores in zip(*batch.values(), strict=True)]
    for result, *expected in zip(found, *each, strict=True):
        assert same_bits(result, torch.stack(expected))


@in_places(TWICE, indirect=["backend"])
def test_second_derivatives(name: str, device: str) -> None:
    """Compare those of a functional Hessian and of a graph with differences of gradients."""
    of, step = problem(name, device), 1e-5

    def gradients(*leaves: Tensor) -> tuple[Tensor, ...]:
        every = tuple(range(len(leaves)))
        return torch.func.grad(lambda *xs: (of(*xs) * of.upstream[0]).sum(), every)(*leaves)

    # The error of a gradient would be half a step's share of the difference.
    with partita.backend("reference"):
        ahead, behind = (
            of.gradients(
                [x + s * d for x, d in zip(of.leaves, of.directions, strict=True)], of.upstream[0]
            )
            for s in (step, -step)
        )
    expected = tuple((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))
    bounds = {"rtol": 1e-6, "atol": 1e-7}
    found = torch.func.vjp(gradients, *of.leaves)[1](tuple(of.directions))
    leaves = [leaf.clone().requires_grad_() for leaf in of.leaves]
    first = torch.autograd.grad(
        of(*leaves), leaves, of.upstream[0], create_graph=True, materialize_grads=True
    )
    total = sum((g * d).sum() for g, d in zip(first, of.directions, strict=True))
    again = torch.autograd.grad(total, leaves, materialize_grads=True, retain_graph=True)
    once_more = torch.autograd.grad(total, leaves, materialize_grads=True)
    for a, b, c, truth in zip(found, again, once_more, expected, strict=True):
        torch.testing.assert_close(a, truth, **bounds)
        torch.testing.assert_close(b, truth, **bounds)
        assert torch.equal(b, c)


class Scatters(TorchDispatchMode):
    """Fails for sums that PyTorch adds up in no fixed order on a GPU."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        # Maxima have no order.
        reduces = name in ("scatter_reduce", "scatter_reduce_") and "amax" not in args
        if name in ("index_add", "index_add_") or reduces:
            assert not args[0].is_floating_point(), name  # sums of integers have no order
        if name in ("scatter_add", "scatter_add_"):
            index = args[2].sort(args[1]).values
            size = index.shape[args[1]]
            repeats = index.narrow(args[1], 1, size - 1) == index.narrow(args[1], 0, size - 1)
            assert not repeats.any()
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_added_up_in_a_fixed_order(name: str) -> None:
    of = problem(name, "cpu")
    leaves = [leaf.clone().requires_grad_() for leaf in of.leaves]
    with partita.backend("reference"), Scatters():
        first = torch.autograd.grad(
            of(*leaves), leaves, of.upstream[0], create_graph=True, materialize_grads=True
        )
        torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True)


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": lambda x: torch._neg_view(-x),
    "part of a conjugate": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "copied on a write": torch._lazy_clone,
}


@each_call
def test_tensors_whose_memory_does_not_hold_their_values(name: str, device: str) -> None:
    of = problem(name, device)
    value, expected = of(*of.leaves), of.gradients(of.leaves, of.upstream[0])
    for lazy in LAZY.values():
        leaves = [leaf.clone().requires_grad_() for leaf in of.leaves]
        found = of(*map(lazy, leaves))
        assert_close((found,), (value,))
        grads = torch.autograd.grad(found, leaves, lazy(of.upstream[0]), materialize_grads=True)
        assert_close(grads, expected)


@each_call
def test_zeros_without_memory(name: str, device: str) -> None:
    of = problem(name, device)

    def zeros(x: Tensor) -> Tensor:
        return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=device)

    leaves = [leaf.clone().requires_grad_() for leaf in of.leaves]
    grads = torch.autograd.grad(of(*leaves), leaves, zeros(of.upstream[0]), materialize_grads=True)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)
    assert_close((of(*map(zeros, of.leaves)),), (of(*map(torch.zeros_like, of.leaves)),))
