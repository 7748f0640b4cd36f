"""Softmax and its relatives by each way that an eager call may take."""

import math

import pytest
import torch
from helpers.rows import Op, check_op, devices, dtypes, leaf, ops

import partita
from partita.testing import EDGES, edge_rows, sample_rows


@dtypes
@pytest.mark.parametrize("edge", EDGES)
@ops
def test_the_reference_against_fp64(op: Op, edge: str, dtype: torch.dtype) -> None:
    """On the CPU PyTorch serves the default backend, so the reference needs a test of its own."""
    with partita.backend("reference"):
        check_op(op, edge_rows(edge, 16, 37, dtype=dtype, device="cpu"), -1)


@pytest.mark.interpreted
@devices
@ops
@pytest.mark.parametrize("shape", [(8, 1000), (3, 5, 70), (2, 600), (3, 1)], ids=str)
def test_gradients_that_elements_share(op: Op, shape: tuple[int, ...], device: str) -> None:
    """Compare the gradient of a sum, which is one number for all elements, with a full tensor's."""
    rows = math.prod(shape[:-1])
    x = sample_rows(rows, shape[-1], device=device).reshape(shape).requires_grad_()
    result = op.ours(x, -1)
    for size in ((1,) * result.ndim, (*result.shape[:-1], 1), (1, *result.shape[1:])):
        grad = sample_rows(1, max(1, torch.Size(size).numel()), device=device).reshape(size)
        shared, full = (
            torch.autograd.grad(result, x, upstream, retain_graph=True)[0]
            for upstream in (grad.expand_as(result), grad.expand_as(result).contiguous())
        )
        # Another layout of the gradient may add a row up in another order.
        torch.testing.assert_close(shared, full, rtol=1e-5, atol=1e-6)


@pytest.mark.interpreted
@devices
@ops
def test_the_result_is_the_same_without_a_gradient(op: Op, device: str) -> None:
    x = leaf(5, 70, device=device)
    with_gradient, detached = op.ours(x, -1), op.ours(x.detach(), -1)
    with torch.no_grad():
        without = op.ours(x, -1)
    assert with_gradient.requires_grad
    assert not (without.requires_grad or detached.requires_grad)
    assert torch.equal(with_gradient, without)
    assert torch.equal(with_gradient, detached)


@ops
def test_a_tangent_is_refused_without_a_gradient(op: Op) -> None:
    x = sample_rows(2, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
            op.ours(dual, -1)
