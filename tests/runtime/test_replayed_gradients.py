"""Backward passes that are one call of the C module, with a driver of host memory."""

from typing import Any

import pytest
import torch
from helpers.replay import Ops, aligned
from torch import Tensor

from partita.runtime import recording


class Subclass(torch.Tensor):
    pass


def record_gradient(ops: Ops, results: int) -> tuple[Tensor, Tensor, float]:
    """Record a gradient op with several results, and return its arguments."""

    def op(grad: Tensor, x: Tensor, factor: float) -> Any:
        found = tuple(torch.zeros_like(x) for _ in range(results))
        for i, result in enumerate(found):
            ops.launch(grad, result, grad.numel(), factor)
            ops.launch(x, result, x.numel(), float(i))
        return found if results > 1 else found[0]

    args = aligned(8), aligned(8), 3.0
    assert ops.record(op, *args).reason is None
    return args


def test_gradients_of_inputs_are_the_results_that_are_needed(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 3)
    needed, positions = (True, False, True, True, False), (2, 1, None, 0)
    with torch.no_grad():
        found = ops.replay.gradients((grad,), (x,), (factor,), needed, positions)
    assert [value is None for value in found] == [False, True, True, False, True]
    torch.testing.assert_close(found[0], 3 * grad + 2 * x)
    torch.testing.assert_close(found[3], 3 * grad)


def test_results_without_an_input_have_no_tensor(ops: Ops) -> None:
    def op(grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        temporary, pair, last = torch.zeros(3), torch.zeros(2, 8), torch.zeros(8)
        ops.launch(grad, pair[0], 8, 2.0)
        ops.launch(pair[0], pair[1], 8, 3.0)
        ops.launch(x, temporary, 3, 1.0)
        ops.launch(temporary, last, 3, 5.0)
        ops.launch(pair[1], last, 8, 1.0)
        return pair, pair[0], last, torch.empty(0, 3), torch.empty(0, 3)

    grad, x = aligned(8), aligned(8)
    assert ops.record(op, grad, x).reason is None
    expected = 6 * grad + 5 * torch.nn.functional.pad(x[:3], (0, 5))
    cases: list[tuple[tuple[bool, ...], list[tuple[int, ...]]]] = [
        ((False, True, False), [(8,), (256 + 256,)]),
        ((True, False, False), [(2, 8), (256 + 256,)]),
        ((True, True, False), [(2, 8), (8,), (256,)]),
        ((False, False, True), [(0, 3), (256 + 2 * 256,)]),
        ((False, False, False), [(256 + 2 * 256,)]),
    ]
    for needed, sizes in cases:
        ops.driver.allocated.clear()
        with torch.no_grad():
            found = ops.replay.gradients((grad, x), (), (), needed, (1, 2, 3))
        assert sorted(ops.driver.allocated) == sorted(sizes)
        assert [value is not None for value in found] == list(needed)
        if needed[0]:
            torch.testing.assert_close(found[0], 2 * grad)
        if needed[1]:
            torch.testing.assert_close(found[1], expected)
    assert [value.shape for value in ops.replay(grad, x)] == [(2, 8), (8,), (8,), (0, 3), (0, 3)]


def test_the_gradient_of_an_op_with_one_result(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 1)
    with torch.no_grad():
        found = ops.replay.gradients((grad, x), (), (factor,), (True, True), (0,))
        assert ops.replay.gradients((grad,), (x, factor), (), (False,), (0,)) == (None,)
    torch.testing.assert_close(found[0], 3 * grad)
    assert found[1] is None


def test_the_number_of_a_result_that_the_op_lacks(ops: Ops) -> None:
    *tensors, factor = record_gradient(ops, 2)
    with torch.no_grad(), pytest.raises(IndexError):
        ops.replay.gradients(tuple(tensors), (), (factor,), (True,), (2,))


def test_python_computes_gradients_that_are_no_plain_replay(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 1)

    def replayed(grad: Any, *options: Any) -> Any:
        return ops.replay.gradients((grad,), (x,), options or (factor,), (True,), (0,))

    assert replayed(grad) is None  # with a second derivative
    with torch.no_grad():
        assert replayed(grad) is not None
        assert replayed(grad, 4.0) == ops.replay(grad, x, 4.0)  # the key of a program to come
        assert replayed(None) is None and replayed(grad.as_subclass(Subclass)) is None
        assert replayed(grad, *range(80)) is None  # too many arguments
        with recording.Recorder((grad,)):
            assert replayed(grad) is None
        assert torch.func.vmap(lambda g: g if replayed(g) is None else -g)(x[None]).equal(x[None])
        with pytest.raises(TypeError):
            ops.replay.gradients([grad], (x,), (factor,))


def test_python_computes_batched_gradients(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 1)
    found = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            found.append(ops.replay.gradients(grads, (x,), (factor,), (True,), (0,)))
            return grads[0]

    y = Square.apply(x.detach().requires_grad_())
    torch.autograd.grad(y, y.grad_fn.next_functions[0][0].variable, grad, retain_graph=True)
    torch.autograd.grad(
        y, y.grad_fn.next_functions[0][0].variable, torch.ones(2, 8), is_grads_batched=True
    )
    assert found[0] is not None and found[1] is None
