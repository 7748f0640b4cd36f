"""Gradients of losses from hidden states, under autograd, compilers, transforms and autocast."""

import contextlib
import itertools

import pytest
import torch
from helpers.linear import PLANS, Batch, batch_of, budgets, ours, results
from helpers.rows import devices
from torch.utils.flop_counter import FlopCounterMode

import partita


@devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "wanted", [w for w in itertools.product((False, True), repeat=3) if any(w)]
)
def test_frozen_parts(wanted: tuple[bool, ...], plan: str, device: str) -> None:
    x = batch_of(bias=True, device=device)
    everything = results(lambda x: ours(x, budgets(x)[plan]), x)
    leaves = [t.clone().requires_grad_(wants) for t, wants in zip(x[:3], wanted, strict=True)]
    loss = ours(Batch(*leaves, *x[3:]), budgets(x)[plan])
    found = torch.autograd.grad(
        loss, [leaf for leaf in leaves if leaf.requires_grad], torch.full_like(loss, 0.5)
    )
    for a, b in zip(found, itertools.compress(everything[1:], wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("unchecked", "fresh_dynamo")
@devices
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("plan", ["fast", "lean"])  # the catalogue has small calls
def test_compile(plan: str, reduction: str, device: str) -> None:
    x = batch_of(bias=True, device=device)
    f = lambda x: ours(x, budgets(x)[plan], reduction=reduction, label_smoothing=0.1)  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, x), results(f, x), rtol=1e-5, atol=1e-6)


@devices
def test_autocast(device: str) -> None:
    x = batch_of(bias=True, device=device)
    leaf, matrix = x.input.clone().requires_grad_(), x.weight.clone().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = partita.linear_cross_entropy(leaf, matrix, x.target, linear_bias=x.bias)
        stats = partita.linear_token_stats(leaf, matrix, x.target)
    halves = [t.bfloat16() for t in (x.input, x.weight, x.bias)]
    assert loss.dtype == stats.entropy.dtype == torch.float32
    torch.testing.assert_close(
        loss, partita.linear_cross_entropy(*halves[:2], x.target, linear_bias=halves[2])
    )
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(loss, (leaf, matrix)))


def test_under_a_dispatch_mode_second_derivatives_are_right() -> None:
    x = batch_of(6, 9)
    found = []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        leaf = x.input.clone().requires_grad_()
        with mode:
            loss = partita.linear_cross_entropy(leaf, x.weight, x.target)
            (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        found.append(torch.autograd.grad((grad**2).sum(), leaf)[0])
    torch.testing.assert_close(*found)
    assert found[0].any()
