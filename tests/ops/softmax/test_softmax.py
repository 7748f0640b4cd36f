"""Softmax, log-softmax and log-sum-exp against fp64, on memory poisoned with NaN."""

import pytest
import torch
from helpers.errors import raises
from helpers.rows import DTYPES, OPS, Op, check_op, devices, devices_and_dtypes, leaf, ops, strided

import partita
from partita.testing import EDGES, assert_within_budget, edge_rows, poisoned_memory, sample_rows

COLUMNS = 37

# The large widths take minutes under the interpreter and no time on a GPU.
WIDTHS = [pytest.param("cpu", width) for width in (1, 2, 3, 64, 129, 300)]
GPU_WIDTHS = (1, 2, 3, 64, 129, 300, 781, 1024, 4097, 8192, 16385, 32768, 50257, 131073, 262144)
# Rows of several blocks, of which only the last one reaches beyond the row's end.
CUT = (1028, 1032, 1280, 1784, 1792, 1800, 2304, 2560, 3584, 4128, 5120, 5248, 7160, 7168)
WIDTHS += [pytest.param("cuda", width, marks=pytest.mark.gpu) for width in (*GPU_WIDTHS, *CUT)]


@pytest.mark.interpreted
@devices_and_dtypes
@pytest.mark.parametrize("edge", EDGES)
@ops
def test_against_fp64(op: Op, edge: str, dtype: torch.dtype, device: str) -> None:
    check_op(op, edge_rows(edge, 16, COLUMNS, dtype=dtype, device=device), -1)


@pytest.mark.interpreted
@pytest.mark.parametrize("edge", ["transposed", "every_other"])
@ops
def test_long_rows_that_are_not_contiguous(op: Op, edge: str) -> None:
    """They have several blocks of classes, each of several rows."""
    check_op(op, edge_rows(edge, 3, 600), -1)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("device", "width"), WIDTHS)
@ops
def test_widths(op: Op, width: int, device: str, dtype: torch.dtype) -> None:
    check_op(op, 3 * sample_rows(3 + 600 // width, width, dtype=dtype, device=device), -1)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((), 0),
        ((), -1),
        ((7,), 0),
        ((5, 6), 0),
        ((3, 5, 4), 1),
        ((3, 5, 4), 0),
        ((2, 3, 4, 5), -2),
        ((0, 4), 1),
        ((5, 1), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["contiguous", "reversed", "spaced"])
@ops
def test_dims_and_strides(
    op: Op, layout: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str
) -> None:
    order = range(len(shape))
    step = 2 if layout == "spaced" else 1
    x = strided(
        shape,
        order if layout == "contiguous" else order[::-1],
        [step] * len(shape),
        dtype=dtype,
        device=device,
        seed=0,
    )
    check_op(op, x, dim, few=True)


@pytest.mark.gpu
def test_a_shape_that_no_block_divides() -> None:
    check_op(OPS["softmax"], sample_rows(1823, 781, device="cuda"), 1)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [(), (0,), (0, 1), (-1, 0), (2, 1), (0, 1, 2), [1, 2]], ids=str)
def test_logsumexp_over_several_dims(dim: tuple[int, ...], keepdim: bool, device: str) -> None:
    x = strided((4, 3, 5), (1, 2, 0), (1, 1, 1), dtype=torch.float32, device=device, seed=0)
    expected = torch.logsumexp(
        x.double(), dim or (0, 1, 2), keepdim
    )  # PyTorch refuses () without keepdim
    result = partita.logsumexp(x, dim, keepdim)
    assert result.shape == expected.shape
    assert_within_budget(result, expected, scale="tensor")


@pytest.mark.interpreted
@devices
def test_rows_of_infinities(device: str) -> None:
    inf = torch.inf
    x = torch.tensor(
        [[-inf, -inf], [inf, 0.0], [inf, -inf], [torch.nan, 0.0], [0.0, -inf]], device=device
    )
    for op in OPS.values():
        assert torch.equal(op.ours(x, -1).nan_to_num(nan=7.0), op.theirs(x, -1).nan_to_num(nan=7.0))


@devices_and_dtypes
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_dtype_argument(name: str, wanted: torch.dtype, dtype: torch.dtype, device: str) -> None:
    op = OPS[name]
    x = leaf(4, 19, dtype=dtype, device=device)
    with poisoned_memory():
        result = op.ours(x, -1, dtype=wanted)
        (grad,) = torch.autograd.grad(result.square().sum(), x)
    theirs = op.theirs(x, -1, dtype=wanted)
    assert (result.dtype, grad.dtype) == (wanted, dtype)
    cast = x.detach().to(wanted).double()
    assert_within_budget(result, op.theirs(cast, -1), theirs, scale=-1)
    (expected,) = torch.autograd.grad(theirs.square().sum(), x)
    eps = max(torch.finfo(dtype).eps, torch.finfo(wanted).eps)
    assert (grad.double() - expected.double()).abs().max() <= 8 * eps * expected.abs().max()


@devices_and_dtypes
@ops
def test_autocast_gives_the_dtype_that_torch_gives(op: Op, dtype: torch.dtype, device: str) -> None:
    x = sample_rows(3, 5, dtype=dtype, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert op.ours(x, -1).dtype == op.theirs(x, -1).dtype


VECTOR, MATRIX = torch.ones(2), torch.ones(2, 2)
BAD = {
    "TypeError: input: expected a Tensor, got list": (partita.softmax, [1.0]),
    "TypeError: input: expected a floating dtype, got torch.int64": (
        partita.softmax,
        VECTOR.long(),
    ),
    "TypeError: dtype: expected a floating dtype, got torch.int64": (
        partita.softmax,
        *(VECTOR, -1, torch.int64),
    ),
    "IndexError: dim: expected a dimension from -1 to 0, got 1": (partita.softmax, VECTOR, 1),
    "IndexError: dim: expected a dimension from -2 to 1, got -3": (partita.log_softmax, MATRIX, -3),
    "TypeError: dim: expected an int, got float": (partita.softmax, VECTOR, 0.0),
    "TypeError: input: expected a floating dtype, got torch.bool": (
        partita.logsumexp,
        VECTOR.bool(),
    ),
    "IndexError: dim: expected a dimension from -2 to 1, got 2": (
        partita.logsumexp,
        MATRIX,
        (0, 2),
    ),
    r"ValueError: dim: expected each dimension once, got \(0, -2\)": (
        partita.logsumexp,
        MATRIX,
        (0, -2),
    ),
}


@pytest.mark.parametrize("error", BAD)
def test_refuses(error: str) -> None:
    function, *arguments = BAD[error]
    with raises(f"{error}$"):
        function(*arguments)
