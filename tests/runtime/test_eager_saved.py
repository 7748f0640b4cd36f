"""What autograd functions whose ops are replayed save for the backward pass, on the CPU."""

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.eager import Served
from helpers.eager_cases import CASES, REPLAYED, assert_equal, leaves_of, numbers, results
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("name", REPLAYED)
def test_saved_tensors_are_checked_and_unpacked_once(
    name: str, is_replayed: bool, served: Served
) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    if is_replayed:
        results(function, leaves)
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.data_ptr())
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        value = function(*leaves)
    found = torch.autograd.grad(value.sum(), leaves)
    assert leaves[0].data_ptr() in packed and len(packed) == len(unpacked)
    value = function(*leaves)
    expected = torch.autograd.grad(value.sum(), leaves, retain_graph=True)
    assert_equal(list(found), list(expected))
    assert_equal(list(torch.autograd.grad(value.sum(), leaves)), list(expected))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(value.sum(), leaves)
    value = function(*leaves)
    with torch.no_grad():
        leaves[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_and_hooks(name: str, served: Served) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    expected = results(function, leaves)
    for _ in range(3):
        found = results(lambda *x: checkpoint(function, *x, use_reentrant=False), leaves)
        assert_equal(found, expected)
    value, seen = function(*leaves), []
    node: Any = value.grad_fn
    node.register_hook(lambda grads, outputs: seen.append(len(grads)))
    value.register_hook(lambda grad: 2 * grad)
    torch.autograd.backward((value * numbers(*value.shape)).sum())
    assert seen
    for leaf, grad in zip(leaves, expected[1:], strict=True):
        torch.testing.assert_close(leaf.grad, 2 * grad)


@pytest.mark.parametrize("name", CASES)
def test_nothing_keeps_tensors_alive(name: str, served: Served) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    for _ in range(3):
        results(function, leaves)
    gc.disable()
    try:
        leaves = leaves_of(name)
        value = function(*leaves)
        value.sum().backward()
        gone = [weakref.ref(x) for x in (*leaves, value)]
        del leaves, value
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()
