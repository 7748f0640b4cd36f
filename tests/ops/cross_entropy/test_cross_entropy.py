"""Cross-entropy with every combination of options, forward and backward, against fp64.

The memory that the kernels write to is poisoned with NaN.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.rows import (
    DTYPES,
    check,
    check_loss,
    class_weights,
    devices,
    dtypes,
    leaf,
    strided,
    targets_for,
    training,
)
from helpers.terms import cross_entropy_terms

import partita
from partita.runtime.dtypes import acc_dtype
from partita.testing import EDGES, edge_rows, sample_labels, sample_rows
from partita.testing.samples import in_torch

CLASSES = 37
REDUCTIONS = ("none", "mean", "sum")
reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
kinds = pytest.mark.parametrize("kind", ["labels", "probabilities"])
OPTIONS = list(itertools.product((False, True), (0.0, 0.1), (None, 5.0), (0.0, 1e-2)))
options = pytest.mark.parametrize(("weight", "label_smoothing", "softcap", "z_loss"), OPTIONS)


@pytest.mark.interpreted
@training
@kinds
@reductions
@options
def test_every_combination_of_options(
    weight, label_smoothing, softcap, z_loss, reduction, kind, dtype, device
) -> None:
    logits = 3 * sample_rows(32, CLASSES, dtype=dtype, device=device)
    weights = class_weights(CLASSES, dtype, device) if weight else None
    numbers = {
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "z_loss": z_loss,
        "reduction": reduction,
    }
    if kind == "probabilities":
        check_loss(logits, targets_for(logits, kind), weights, **numbers)
    for ignore_index in (-100, 3) if kind == "labels" else ():
        check_loss(
            logits,
            targets_for(logits, kind, ignored=ignore_index),
            weights,
            ignore_index=ignore_index,
            **numbers,
        )


@pytest.mark.interpreted
@training
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str, dtype: torch.dtype, device: str) -> None:
    logits = edge_rows(edge, 16, CLASSES, dtype=dtype, device=device)
    target = targets_for(logits, "labels")
    for reduction in REDUCTIONS:
        check_loss(logits, target, reduction=reduction)
    if "inf" not in edge and len(logits):
        check_loss(logits, target, reduction="none", z_loss=1e-4, label_smoothing=0.2)
        check_loss(logits, targets_for(logits, "probabilities"))


WIDTHS = [pytest.param("cpu", width) for width in (1, 2, 3, 64, 129, 300)]
WIDTHS += [
    pytest.param("cuda", width, marks=pytest.mark.gpu)
    for width in (1, 3, 64, 129, 781, 1024, 4097, 16385, 32768, 50257, 131073, 262144)
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("device", "width"), WIDTHS)
def test_widths(width: int, device: str) -> None:
    dtype = torch.bfloat16
    logits = 3 * sample_rows(5 + 600 // width, width, dtype=dtype, device=device)
    target = targets_for(logits, "labels", ignored=-100)
    for reduction in ("none", "mean"):
        check_loss(logits, target, reduction=reduction)
        check_loss(
            logits, target, reduction=reduction, label_smoothing=0.1, softcap=5.0, z_loss=1e-3
        )


SHAPES = [
    (CLASSES,),
    (1, CLASSES),
    (4, 1),
    (0, CLASSES),
    (2, CLASSES, 3),
    (2, CLASSES, 0),
    (2, CLASSES, 3, 2),
    (2, 5, 1, 2, 3),
]


@pytest.mark.interpreted
@devices
@kinds
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("layout", ["contiguous", "classes_last", "spaced"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_strides(
    shape: tuple[int, ...], layout: str, reduction: str, kind: str, device: str
) -> None:
    order = list(range(len(shape)))
    if layout == "classes_last" and len(shape) > 1:
        order.append(order.pop(1))
    steps = [2 if layout == "spaced" else 1] * len(shape)
    logits = strided(shape, order, steps, dtype=torch.float32, device=device, seed=0)
    target = targets_for(logits, kind, ignored=-100)
    result = partita.cross_entropy(logits, target, reduction=reduction)
    assert result.shape == F.cross_entropy(logits, target, reduction=reduction).shape
    check_loss(logits, target, reduction=reduction, few=True)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_labels_of_any_integer_dtype_and_stride(dtype: torch.dtype, device: str) -> None:
    logits = sample_rows(6, CLASSES, device=device)
    labels = targets_for(logits, "labels")
    expected = partita.cross_entropy(logits, labels, reduction="none")
    spaced = labels.to(dtype).repeat_interleave(3)[::3]
    assert torch.equal(partita.cross_entropy(logits, spaced, reduction="none"), expected)
    one = labels[:1].to(dtype).expand(6)
    assert torch.equal(
        partita.cross_entropy(logits, one, reduction="none"),
        partita.cross_entropy(logits, one.contiguous().long(), reduction="none"),
    )


@pytest.mark.interpreted
@devices
@reductions
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_all_ignored(rows: int | None, reduction: str, device: str) -> None:
    """Check that a mean over no rows is NaN.

    This includes a row without a batch, for which torch gives NaN on the CPU and 0 on CUDA.
    """
    logits = leaf(rows or 1, CLASSES, device=device)
    target = torch.full((rows or 1,), -100, device=device)
    ours = partita.cross_entropy(
        *((logits, target) if rows else (logits[0], target[0])), reduction=reduction
    )
    expected = torch.full_like(ours, torch.nan if reduction == "mean" else 0.0)
    assert ours.shape == (target.shape if rows and reduction == "none" else ())
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    (grad,) = torch.autograd.grad(ours.sum(), logits)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_of_a_small_probability_does_not_change_the_others(dtype: torch.dtype) -> None:
    """One pass computes the loss of such a row in another way, and of no other row."""
    logits = sample_rows(2, 2**20, dtype=dtype)
    target = torch.tensor([3, -100])
    found = []
    for last in (0.0, 1e4):
        x = logits.clone()
        x[1, 0] = last
        found.append(partita.cross_entropy(x.requires_grad_(), target, reduction="sum"))
    assert torch.equal(*found)


@devices
@pytest.mark.parametrize(
    "numbers", [{}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}], ids=["plain", "all"]
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_of_probabilities_and_of_their_class_weights(
    reduction: str, numbers: dict[str, float], device: str
) -> None:
    """Compare the gradients with autograd's, also where a probability or a weight is 0."""
    logits = sample_rows(4, CLASSES, device=device)
    target, weight = (
        targets_for(logits, "probabilities"),
        class_weights(CLASSES, torch.float32, device),
    )
    target[:2] = F.one_hot(targets_for(logits, "labels")[:2], CLASSES)
    options = {"reduction": reduction, **numbers}
    check(
        lambda *t: partita.cross_entropy(*t, **options),
        lambda *t: in_torch.cross_entropy(*t, **options),
        logits,
        target,
        weight,
        scale="tensor",
    )


@devices
@dtypes
@kinds
def test_result_has_the_dtype_that_torch_gives(kind: str, dtype: torch.dtype, device: str) -> None:
    logits = sample_rows(4, 7, dtype=dtype, device=device)
    target = targets_for(logits, kind)
    weight = class_weights(7, dtype, device)
    for arguments in ((logits, target), (logits, target, weight)):
        assert partita.cross_entropy(*arguments).dtype == F.cross_entropy(*arguments).dtype
        with torch.autocast(device, torch.bfloat16):
            assert partita.cross_entropy(*arguments).dtype == F.cross_entropy(*arguments).dtype
    if kind == "probabilities":
        for other in DTYPES:
            assert (
                partita.cross_entropy(logits, target.to(other)).dtype
                == F.cross_entropy(logits, target.to(other)).dtype
            )


@pytest.mark.interpreted
@devices
def test_fp16_gradient_under_a_loss_scale(device: str) -> None:
    """Check that fp16 gradients do not underflow under a loss scale.

    If the gradient were divided by the number of rows before the scale is known, most of it would
    be below the smallest number of fp16.
    """
    logits = sample_rows(512, 64, dtype=torch.float16, device=device)
    target = targets_for(logits, "labels")

    def scaled(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return partita.cross_entropy(x, target)

    upstream = torch.tensor(65536.0, device=device)
    terms = cross_entropy_terms(logits, target, None, upstream)
    check(
        scaled,
        lambda x: F.cross_entropy(x.to(acc_dtype(x.dtype)), target),
        logits,
        upstream=[upstream],
        scale=terms[0],
        grad_scale=terms[1],
    )


X, T = sample_labels(4, 7)
BAD = {
    "TypeError: input: expected a Tensor, got list": {"input": [1.0]},
    "TypeError: input: expected a floating dtype, got torch.int64": {"input": T},
    "TypeError: target: expected a Tensor, got int": {"target": 1},
    r"ValueError: input: expected shape \[N, C, ...\] or \[C\], got \[\]": {"input": X[0, 0]},
    "TypeError: target: expected an integer dtype, got torch.bool": {"target": T.bool()},
    "TypeError: target: expected an integer dtype, got torch.float32": {"target": X[:, 0]},
    r"ValueError: target: expected shape .* = \[4\], got \[3\]": {"target": T[:3]},
    r"ValueError: target: expected shape .* = \[\], got \[4\]": {"input": X[0]},
    "ValueError: target: expected the device of input, meta, got cpu": {"input": X.to("meta")},
    "TypeError: weight: expected a floating dtype, got torch.int64": {"weight": T},
    r"ValueError: weight: expected shape \[C\] = \[7\], got \[3\]": {"weight": X[0, :3]},
    "ValueError: weight: expected the device of input, cpu, got meta": {"weight": X[0].to("meta")},
    "RuntimeError: weight: not differentiable with label targets.*": {
        "weight": X[0].clone().requires_grad_()
    },
    "ValueError: ignore_index: expected none .* with target probabilities, got 0": {
        "target": X,
        "ignore_index": 0,
    },
    "ValueError: reduction: expected one of 'none', 'mean', 'sum', got 'max'": {"reduction": "max"},
    "ValueError: label_smoothing: .* at least 0.0 and at most 1.0, got 1.5": {
        "label_smoothing": 1.5
    },
    "TypeError: label_smoothing: expected a number, got str": {"label_smoothing": "a"},
    "ValueError: softcap: expected a number above 0.0, got 0.0": {"softcap": 0.0},
    "ValueError: softcap: expected a number above 0.0, got nan": {"softcap": float("nan")},
    "ValueError: z_loss: expected a number of at least 0.0, got -1.0": {"z_loss": -1.0},
    "ValueError: z_loss: expected a number of at least 0.0, got inf": {"z_loss": float("inf")},
}


@pytest.mark.parametrize("error", BAD)
def test_refuses(error: str) -> None:
    with raises(f"{error}$"):
        partita.cross_entropy(**{"input": X, "target": T, **BAD[error]})
