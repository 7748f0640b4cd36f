"""Backward passes that are one call of the C module, with a driver of host memory."""

from types import SimpleNamespace
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


def gradients(
    ops: Ops,
    grads: tuple[Any, ...],
    saved: tuple[Any, ...],
    options: tuple[Any, ...],
    positions: tuple[int | None, ...],
) -> Any:
    """Return what the C module returns to PyTorch, or the saved tensors that it gives to Python."""

    def python(ctx: Any, given: tuple[Any, ...], saved: tuple[Any, ...] | None) -> Any:
        assert given == grads
        return "python", saved

    call = ops.driver.module.EagerCall(
        *(ops.replay, ops.replay, None, (None, None, None, python), (), (0,), (), ()),
        *(len(grads), len(saved), -1, -1, True, False),
    )
    ctx = SimpleNamespace(link=(options, positions, (), None), saved_tensors=saved)
    return call.backward(ctx, *grads)


def test_gradients_of_inputs_are_the_results_that_are_needed(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 3)
    with torch.no_grad():
        found = gradients(ops, (grad,), (x,), (factor,), (2, None, None, 0, None))
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
    cases: list[tuple[tuple[int | None, ...], list[tuple[int, ...]]]] = [
        ((None, 2, None), [(8,), (256 + 256,)]),
        ((1, None, None), [(2, 8), (256 + 256,)]),
        ((1, 2, None), [(2, 8), (8,), (256,)]),
        ((None, None, 3), [(0, 3), (256 + 2 * 256,)]),
        ((None, None, None), [(256 + 2 * 256,)]),
    ]
    for positions, sizes in cases:
        ops.driver.allocated.clear()
        with torch.no_grad():
            found = gradients(ops, (grad, x), (), (), positions)
        assert sorted(ops.driver.allocated) == sorted(sizes)
        assert [value is not None for value in found] == [i is not None for i in positions]
        if found[0] is not None:
            torch.testing.assert_close(found[0], 2 * grad)
        if found[1] is not None:
            torch.testing.assert_close(found[1], expected)
    assert [value.shape for value in ops.replay(grad, x)] == [(2, 8), (8,), (8,), (0, 3), (0, 3)]


def test_the_gradient_of_an_op_with_one_result(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 1)
    with torch.no_grad():
        found = gradients(ops, (grad, x), (), (factor,), (0, None))
        assert gradients(ops, (grad,), (x,), (factor,), (None,)) == (None,)
        with pytest.raises(IndexError):
            gradients(ops, (grad,), (x,), (factor,), (1,))
    torch.testing.assert_close(found[0], 3 * grad)
    assert found[1] is None


def test_the_number_of_a_result_that_the_op_lacks(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 2)
    with torch.no_grad(), pytest.raises(IndexError):
        gradients(ops, (grad,), (x,), (factor,), (2,))


def test_python_computes_gradients_that_are_no_plain_replay(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 1)

    def replayed(grad: Any, *options: Any) -> Any:
        return gradients(ops, (grad,), (x,), options or (factor,), (0,))

    assert replayed(grad) == ("python", None)  # with a second derivative
    with torch.no_grad():
        assert replayed(grad)[0] != "python"
        assert replayed(grad, 4.0) == ("python", (x,))  # which records the call
        for other in (None, grad.as_subclass(Subclass)):
            assert replayed(other) == ("python", None)  # the saved tensors are not unpacked
        assert replayed(grad, *range(80)) == ("python", (x,))  # too many arguments
        with recording.Recorder((grad,)):
            assert replayed(grad) == ("python", None)
        found: list[Any] = []
        torch.func.vmap(lambda g: found.append(replayed(g)) or g)(x[None])
        assert found == [("python", None)]


NUMBERS = (1, 0, -1, -1, True, False)


def test_a_context_without_a_link(ops: Ops) -> None:
    positions: tuple[Any, ...] = ((), (0,), (), ())
    make, functions = ops.driver.module.EagerCall, (None, None, None, None)
    call = make(ops.replay, ops.replay, None, functions, *positions, *NUMBERS)
    with torch.no_grad(), pytest.raises(AttributeError, match="link"):
        call.backward(SimpleNamespace(), aligned(8))


def test_the_arguments_of_eager_calls_are_checked(ops: Ops) -> None:
    make, positions = ops.driver.module.EagerCall, [(), (0,), (), ()]
    with pytest.raises(TypeError):
        make(ops.replay, None, None, (None,), *positions, *NUMBERS)
    with pytest.raises(ValueError, match="at most 64 positions"):
        functions, numbers = (None, None, None, None), tuple(range(65))
        make(ops.replay, None, None, functions, numbers, *positions[1:], *NUMBERS)


def test_the_result_of_a_context_is_scaled_in_place(ops: Ops) -> None:
    def double(x: Tensor, factor: Tensor, backend: str) -> None:
        ops.launch(x, x, x.numel(), 1.0)

    x, factor = aligned(8), aligned(1)
    assert ops.record(double, x, factor, "auto").reason is None
    in_python: list[Any] = []
    call = ops.driver.module.EagerCall(
        *(
            ops.replay,
            ops.replay,
            None,
            (None, None, None, lambda *args: in_python.append(args[1:])),
        ),
        *((0,), (0,), (), (), 1, 0, -1, 1, False, True),
    )
    x = aligned(8)
    expected, ctx = 2 * x, SimpleNamespace(link=((3, "auto"), (0, None), (), None), result=x)
    with torch.no_grad():
        found = call.backward(ctx, factor)
        assert found[0] is x and found[1] is None and ctx.result is None
        torch.testing.assert_close(x, expected)
        call.backward(ctx, factor)  # the second backward pass
        ctx.result = aligned(9)
        call.backward(ctx, factor)
        key = ops.replay(ctx.result, factor, "auto")
    assert in_python == [((factor,), None), ((factor,), key)]


def test_python_computes_batched_gradients(ops: Ops) -> None:
    grad, x, factor = record_gradient(ops, 1)
    found = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            found.append(gradients(ops, grads, (x,), (factor,), (0,)))
            return grads[0]

    y = Square.apply(x.detach().requires_grad_())
    torch.autograd.grad(y, y.grad_fn.next_functions[0][0].variable, grad, retain_graph=True)
    torch.autograd.grad(
        y, y.grad_fn.next_functions[0][0].variable, torch.ones(2, 8), is_grads_batched=True
    )
    assert found[0][0] != "python" and found[1] == ("python", (x,))
