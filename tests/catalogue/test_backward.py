"""Plain backward passes of every call: repeated, added up, in a checkpoint, or not needed."""

import re

import pytest
import torch
from helpers.catalogue import BACKEND, DIFFERENTIABLE, same_bits
from helpers.rows import INTERPRETING, devices
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import partita
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw, Sample

each_call = pytest.mark.parametrize("name", DIFFERENTIABLE)
pytestmark = pytest.mark.interpreted


def samples(name: str, draw: Draw) -> list[Sample]:
    """Return a plain call, one with a reduction, and one in chunks of classes."""
    call = CALLS[name]
    options = [option for option in ("mean", "lean") if option in call.options and not INTERPRETING]
    return [call.sample(draw), *(call.sample(draw, option) for option in options)]


def total_of(results: tuple[Tensor, ...]) -> Tensor:
    return sum(r.double().square().sum() for r in results if r.requires_grad)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_call
def test_every_backward_pass_gives_the_same_bits(
    name: str, dtype: torch.dtype, device: str
) -> None:
    if INTERPRETING and dtype == torch.bfloat16:
        pytest.skip("the interpreter takes long")
    with partita.backend(BACKEND), poisoned_memory():
        for sample in samples(name, Draw(dtype, device=device)):
            leaves = list(sample.leaves.values())
            before = [x.detach().clone() for x in leaves]
            versions = [x._version for x in leaves]
            total = total_of(sample.run())
            first = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
            for count in (1, 2) if "in place" not in name else ():
                total.backward(retain_graph=count == 1)
                for x, gradient in zip(leaves, first, strict=True):
                    assert x.grad is None or same_bits(x.grad, count * gradient), sample
            again = total_of(sample.run())
            assert torch.equal(again, total)
            found = torch.autograd.grad(again, leaves, materialize_grads=True)
            assert all(map(same_bits, found, first)), sample
            for x, old, version in zip(leaves, before, versions, strict=True):
                assert same_bits(x.detach(), old) and x._version == version


@devices
@each_call
def test_contexts_have_tensors_that_are_saved_alone(name: str, device: str) -> None:
    """Only those are dropped under a checkpoint, or moved by hooks."""
    with partita.backend(BACKEND):
        for sample in samples(name, Draw(device=device)):
            nodes = [total_of(sample.run()).grad_fn]
            for node in nodes:
                kept = tree_leaves(list(getattr(node, "__dict__", {}).values()))
                assert not any(isinstance(x, Tensor) for x in kept), (sample, node)
                nodes += [next for next, _ in node.next_functions if next not in (None, *nodes)]


@devices
@each_call
def test_gradients_of_two_calls_of_the_same_tensors_add_up(name: str, device: str) -> None:
    with partita.backend(BACKEND):
        for sample in samples(name, Draw(torch.float64, device=device)):
            leaves = sample.leaves
            single = torch.autograd.grad(
                total_of(sample.run()), list(leaves.values()), materialize_grads=True
            )
            shared = {part: 1 * x for part, x in leaves.items()}
            total = total_of(sample.run(**shared)) + total_of(sample.run(**shared))
            both = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
            for found, expected in zip(both, single, strict=True):
                torch.testing.assert_close(found, 2 * expected)


@devices
@each_call
def test_results_without_a_gradient(name: str, device: str) -> None:
    with partita.backend(BACKEND):
        for sample in samples(name, Draw(device=device)):
            with_gradient = sample.run()
            with torch.no_grad():
                without = sample.run()
            assert not any(r.requires_grad for r in without)
            torch.testing.assert_close(without, with_gradient, equal_nan=True)


@devices
@each_call
def test_checkpoints(name: str, device: str) -> None:
    with partita.backend(BACKEND):
        for sample in samples(name, Draw(device=device)):
            leaves = list(sample.leaves.values())
            plain = torch.autograd.grad(total_of(sample.run()), leaves, materialize_grads=True)
            total = checkpoint(lambda *_, s=sample: total_of(s.run()), *leaves, use_reentrant=False)
            found = torch.autograd.grad(total, leaves, materialize_grads=True)
            assert all(map(same_bits, found, plain)), sample


@each_call
def test_forward_mode_is_right_or_refused(name: str) -> None:
    sample = CALLS[name].sample(Draw(torch.float64))
    first, x = next(iter(sample.leaves.items()))

    def function(x: Tensor) -> Tensor:
        return total_of(sample.run(**{first: x}))

    try:
        _, tangent = torch.func.jvp(function, (x.detach(),), (x.detach(),))
    except (RuntimeError, NotImplementedError) as refused:
        assert re.search(r"forward.mode|jvp", str(refused))
        return
    (gradient,) = torch.autograd.grad(function(x), x)
    torch.testing.assert_close(tangent, (gradient * x).sum())
