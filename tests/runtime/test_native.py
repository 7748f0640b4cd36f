"""Small calls that the C module lets a function of PyTorch serve, with a driver of host memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.replay import Ops
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import partita
from partita.runtime import launcher, native

LIMIT = 64


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def serve(compiled: Ops, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor | None]:
    monkeypatch.setattr(launcher, "_found", (compiled.driver.module, ""))
    return lambda x, dim=-1: native.serve(torch._softmax, LIMIT, x, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4), (1, 64)])
def test_small_dense_tensors_are_served(
    shape: tuple[int, ...], dtype: torch.dtype, serve: Callable[..., Tensor | None]
) -> None:
    x = torch.randn(shape, dtype=dtype)
    assert torch.equal(serve(x), x.softmax(-1)) and torch.equal(serve(x, 0), x.softmax(0))
    assert serve(torch.nn.Parameter(x)) is not None


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(65),
        torch.zeros(3, 4).T,
        torch.zeros(4).expand(3, 4),
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(3, 4, dtype=torch.int64),
        torch.zeros(3, 4, dtype=torch.complex64),
        torch.zeros(3, 4, device="meta"),
        torch.zeros(3, 4).as_subclass(Subclass),
        torch.zeros(0).as_strided((0, 2**40, 2**40), (1, 2**40, 1)),
        [0.0, 1.0],
    ],
    ids=[
        "large",
        "transposed",
        "expanded",
        "half",
        "integer",
        "complex",
        "meta",
        "subclass",
        "sizes",
        "list",
    ],
)
def test_the_op_serves_others(x: Any, serve: Callable[..., Tensor | None]) -> None:
    assert serve(x) is None


@pytest.mark.parametrize("dim", [2, -3, True, 1.0, None])
def test_the_op_says_what_is_wrong_with_a_dimension(
    dim: Any, serve: Callable[..., Tensor | None]
) -> None:
    assert serve(torch.zeros(3, 4), dim) is None
    with pytest.raises((IndexError, TypeError), match="dim: expected"):
        partita.softmax(torch.zeros(3, 4), dim)


def test_the_op_serves_calls_in_other_modes(serve: Callable[..., Tensor | None]) -> None:
    x, found = torch.zeros(3, 4), []
    torch.vmap(lambda row: found.append(serve(row)) or row)(x)
    torch.func.grad(lambda row: (found.append(serve(row)), row.sum())[1])(x)
    with Mode():
        found.append(serve(x))
    with partita.backend("reference"):
        found.append(serve(x))
    with torch.autograd.forward_ad.dual_level():
        found.append(serve(x))
    assert found == [None] * 5 and serve(x) is not None


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_the_functions_and_their_derivatives(
    name: str, serve: Callable[..., Tensor | None]
) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    function = getattr(partita, name)
    assert torch.equal(function(x), getattr(torch, name)(x, -1))
    assert torch.equal(function(x, 0), getattr(torch, name)(x, 0))
    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)
    assert torch.equal(torch.compile(function, backend="eager")(x), function(x))


def test_many_calls_load_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(launcher, "module", lambda: started.append(1))
    monkeypatch.setattr(native, "_calls", iter(range(1, 100)))
    for _ in range(native.CALLS_BEFORE_LOADING - 1):
        native.note_call()
    assert not started
    for _ in range(20):
        native.note_call()
    assert started == [1]
