"""Tensors with one number for each row as kernels read them, and the way of an eager call."""

import pytest
import torch

pytest.importorskip("triton")
from partita.primitives.gpu.row_plan import flat_rows
from partita.runtime.autograd import native_serves, needs_no_derivative


@pytest.mark.parametrize(
    ("tensor", "step"),
    [
        (torch.arange(6.0), 1),
        (torch.arange(12.0)[::2], 2),
        (torch.tensor(3.0).expand(6), 0),
        (torch.tensor(3.0).expand(2, 3), 0),
        (torch.arange(6.0).reshape(2, 3), 1),
        (torch.arange(6.0).reshape(2, 3).T, 1),
        (torch.arange(3.0).expand(2, 3), 1),
        (torch.tensor(3.0), 1),
        (torch.zeros(0, 3), 1),
    ],
    ids=str,
)
def test_flat_rows_finds_each_number(tensor: torch.Tensor, step: int) -> None:
    flat, found = flat_rows(tensor)
    assert found == step
    index = [i * step for i in range(tensor.numel())]
    memory = flat.as_strided((max(index, default=-1) + 1,), (1,), flat.storage_offset())
    assert torch.equal(memory[index], tensor.flatten())


def test_flat_rows_passes_on_that_there_is_no_tensor() -> None:
    assert flat_rows(None) == (None, 1)


def test_a_derivative_is_needed_only_with_gradients_in_eager_mode() -> None:
    x, leaf = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert needs_no_derivative(x, None)
    assert not needs_no_derivative(x, leaf)
    with torch.no_grad():
        assert needs_no_derivative(x, leaf)
    inside = []
    torch.vmap(lambda x: inside.append(needs_no_derivative(x)) or x)(x)
    assert inside == [False]


def test_pytorch_serves_contiguous_tensors_of_full_precision_in_eager_mode() -> None:
    x = torch.zeros(2, 3)
    assert native_serves(x)
    assert not native_serves(x.T)
    assert not native_serves(x.half())
    inside = []
    torch.vmap(lambda x: inside.append(native_serves(x)) or x)(x)
    assert inside == [False]
