"""Divergences against fp64: values, gradients, masks, rows of -inf, bad input."""

import pytest
import torch
from helpers.divergence import truth
from helpers.errors import raises
from helpers.rows import INTERPRETING, devices, devices_and_dtypes, gradients
from torch import Tensor

import partita
from partita.testing import sample_rows

pytestmark = pytest.mark.interpreted
BETAS = (0.0, 0.25, 1.0)


def sample(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    rows = torch.Size(shape[:-1]).numel()
    x, t = (sample_rows(rows, shape[-1], device=device) for _ in range(2))
    t = (0.5 * x + t.flip(-1)).to(dtype)
    return x.to(dtype).view(shape), t.view(shape)


@devices_and_dtypes
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.5, 4.0)])
@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 300), (2, 9000), (4, 1)], ids=str)
def test_values_and_gradients(
    shape: tuple[int, ...],
    temperature: float,
    softcap: float | None,
    beta: float,
    dtype: torch.dtype,
    device: str,
) -> None:
    x, t = sample(*shape, dtype=dtype, device=device)
    x.requires_grad_()
    loss = partita.divergence(
        x, t, beta=beta, temperature=temperature, softcap=softcap, reduction="none"
    )
    exact = x.detach().double().requires_grad_()
    expected = truth(exact, t, beta, temperature, softcap or 0.0)
    single = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == single and loss.shape == shape[:-1]
    eps = torch.finfo(single).eps
    torch.testing.assert_close(loss.double(), expected, rtol=64 * eps, atol=64 * eps)
    (grad,), (true,) = gradients(loss, [x]), gradients(expected, [exact])
    assert grad.dtype == dtype
    # Triton's interpreter truncates to bf16, which has twice the error of rounding.
    rounding = torch.finfo(dtype).eps / (1 if INTERPRETING else 2)
    bound = max(1.01 * rounding, 256 * eps)
    torch.testing.assert_close(grad.double(), true, rtol=bound, atol=64 * eps)


@devices_and_dtypes
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("temperature", "softcap", "masked"), [(1.0, None, False), (0.7, 4.0, True)]
)
@pytest.mark.parametrize("shape", [(5, 37), (3, 2, 1000), (4, 1)], ids=str)
def test_reduced_values_and_gradients(
    shape: tuple[int, ...],
    temperature: float,
    softcap: float | None,
    masked: bool,
    beta: float,
    dtype: torch.dtype,
    device: str,
) -> None:
    x, t = sample(*shape, dtype=dtype, device=device)
    counted = torch.arange(x[..., 0].numel(), device=device) % 3 != 1
    mask = counted.view(shape[:-1]) if masked else None
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    rows = truth(exact, t, beta, temperature, softcap or 0.0)
    mean = rows.mean() if mask is None else rows[mask].mean()
    options = {"beta": beta, "temperature": temperature, "softcap": softcap, "mask": mask}
    loss = partita.divergence(leaf, t, **options)
    single = torch.float64 if dtype == torch.float64 else torch.float32
    eps = torch.finfo(single).eps
    torch.testing.assert_close(loss.double(), mean, rtol=64 * eps, atol=64 * eps)
    # An upstream gradient that is not 1 rounds the gradient once more, except for a power of 2.
    upstream = torch.tensor(0.25, dtype=single, device=device)
    found = [torch.autograd.grad(loss, leaf, upstream, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*found) and found[0].dtype == dtype
    (true,) = torch.autograd.grad(mean, exact, torch.tensor(0.25, dtype=torch.float64).to(mean))
    rounding = torch.finfo(dtype).eps / (1 if INTERPRETING else 2)
    bound = max(1.01 * rounding, 256 * eps)
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0].double(), true, rtol=bound, atol=16 * eps + 2 * tiny)
    total = partita.divergence(leaf, t, **options, reduction="sum")
    M = rows.numel() if mask is None else mask.sum()
    torch.testing.assert_close(total.double(), mean * M, rtol=64 * eps, atol=64 * eps)


@devices
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [9000, 20_001, 70_000, 128_256])
def test_rows_of_many_classes(classes: int, dtype: torch.dtype, beta: float, device: str) -> None:
    if INTERPRETING and classes > 9000:
        pytest.skip("programs that wait for one another need a GPU")
    x, t = sample(7, classes, dtype=dtype, device=device)
    x[1, : classes // 2] = t[1, : classes // 2] = -torch.inf  # whole parts of a row
    x[2], t[2] = x[2] + 64, t[2] - 64
    x[3, -100:] += 300  # the exponentials overflow beside those of the first classes
    mask = torch.arange(7, device=device) != 4
    # In fp64 the exponential of -600 vanishes beside others, and it has a derivative.
    leaf, exact = x.clone().requires_grad_(), x.double().clamp(min=-600.0).requires_grad_()
    loss = partita.divergence(leaf, t, beta=beta, mask=mask)
    mean = truth(exact, t.double().clamp(min=-600.0), beta)[mask].mean()
    torch.testing.assert_close(loss.double(), mean, rtol=1e-5, atol=1e-6)
    found, true = (torch.autograd.grad(each, of)[0] for each, of in ((loss, leaf), (mean, exact)))
    rounding = torch.finfo(dtype).eps / (1 if INTERPRETING else 2)
    bound = max(1.01 * rounding, 2**-15)
    # The interpreter rounds inside a multiply-add, whose product is large where logits are.
    atol = 1e-7 if INTERPRETING else 4e-9
    torch.testing.assert_close(found.double(), true, rtol=bound, atol=atol)
    assert not found[4].any()
    other = x.clone().requires_grad_()
    partita.divergence(other, t, beta=beta, mask=mask).backward()
    assert torch.equal(other.grad, found)


@devices
@pytest.mark.parametrize("beta", BETAS)
def test_offsets_cancel(beta: float, device: str) -> None:
    x, t = sample(4, 200, device=device)
    x, t = x.round(decimals=1), t.round(decimals=1)
    moved = x + 8192, t - 4096
    expected = truth(moved[0], moved[1], beta)
    found = partita.divergence(*moved, beta=beta, reduction="none")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("beta", BETAS)
def test_the_same_distribution(beta: float, device: str) -> None:
    x, _ = sample(4, 500, device=device)
    leaf = x.requires_grad_()
    loss = partita.divergence(leaf, x.detach() + 3.0, beta=beta, reduction="none")
    assert (loss.abs() <= 1e-5).all()
    assert gradients(loss, [leaf])[0].abs().max() <= 1e-6


@devices
@pytest.mark.parametrize("beta", BETAS)
def test_masked_classes(beta: float, device: str) -> None:
    x, t = sample(3, 30, device=device)
    x[:, 3:7] = t[:, 3:9] = -torch.inf
    x[1, 5] = 0.5  # a class that only the student has
    t[2, 3] = 0.5  # and one that only the teacher has
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    loss = partita.divergence(leaf, t, beta=beta, reduction="none")
    expected = truth(exact, t, beta)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    finite = expected.isfinite()
    assert finite[0] or beta == 1
    rows = [i for i in range(3) if finite[i]]
    with torch.no_grad():
        p, q = x.double().softmax(-1), t.double().softmax(-1)
    grad = gradients(loss[rows].sum()[None], [leaf])[0][rows]
    assert not grad.isnan().any()
    if beta == 0:
        torch.testing.assert_close(grad.double(), -(p - q)[rows], rtol=1e-5, atol=1e-6)


@devices
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_masks(reduction: str, device: str) -> None:
    """They have any dtype, and the mean over no rows is NaN."""
    x, t = sample(2, 4, 20, device=device)
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]], device=device)
    expected = truth(x, t, 0.25) * mask
    if reduction != "none":
        expected = expected.sum() / (mask.sum() if reduction == "mean" else 1)
    x[0, 1, 3] = torch.nan  # in a masked row
    for given in (mask, mask.bool(), mask.float()):
        loss = partita.divergence(x, t, beta=0.25, mask=given, reduction=reduction)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert partita.divergence(x, t, mask=torch.zeros_like(mask)).isnan()


@devices
@pytest.mark.parametrize("beta", BETAS)
def test_second_derivatives_of_impossible_classes(beta: float, device: str) -> None:
    """A class that neither side has takes no part, and a tangent needs no gradient from above."""
    x, t = (each.double() for each in sample(3, 12, device=device))
    x[:, 3:5] = t[:, 3:5] = -torch.inf
    v, rest = torch.linspace(-1, 1, 12, dtype=x.dtype, device=device).expand(3, -1), x.isfinite()

    def second(x: Tensor, t: Tensor, v: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        loss = partita.divergence(leaf, t, beta=beta, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
        return torch.autograd.grad((grad * v).sum(), leaf)[0]

    parts = [each[rest].view(3, -1) for each in (x, t, v)]
    found = second(x, t, v)
    assert not found[~rest].any()
    torch.testing.assert_close(found[rest].view(3, -1), second(*parts))
    x, t, v = parts

    def loss(x: Tensor) -> Tensor:
        return partita.divergence(x, t, beta=beta, reduction="none")

    _, tangent = torch.autograd.functional.jvp(loss, x, v)
    step = 1e-6 * v
    expected = (loss(x + step) - loss(x - step)) / 2e-6
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-8)


@devices
@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_in_fp32_of_a_student_in_fp64(beta: float, device: str) -> None:
    """The result has the digits of fp64, as if the teacher's numbers were fp64, and vice versa."""
    x, t = (each.float() for each in sample(3, 20, device=device))
    exact = partita.divergence(x.double(), t.double(), beta=beta, softcap=5.0)
    for pair in ((x.double(), t), (x, t.double())):
        leaf = pair[0].clone().requires_grad_()
        loss = partita.divergence(leaf, pair[1], beta=beta, softcap=5.0)
        (grad,) = torch.autograd.grad(loss, leaf)
        assert loss.dtype == torch.float64 and grad.dtype == leaf.dtype
        torch.testing.assert_close(loss, exact, rtol=1e-14, atol=1e-15)


def test_the_teacher_gets_no_gradient() -> None:
    x, t = sample(2, 6)
    t.requires_grad_()
    loss = partita.divergence(x.requires_grad_(), t)
    assert torch.autograd.grad(loss, t, allow_unused=True) == (None,)


X, T = sample(2, 6)
BAD = {
    "TypeError: teacher_logits: expected": {"teacher_logits": T.long()},
    r"ValueError: teacher_logits: expected the shape of logits = \[2, 6\], got \[2, 5\]; cut the"
    " longer": {"teacher_logits": T[:, :-1]},
    r"ValueError: teacher_logits: expected the shape of logits = \[2, 6\], got \[1, 6\]$": {
        "teacher_logits": T[:1]
    },
    "ValueError: beta: expected": {"beta": 1.5},
    "ValueError: temperature: expected": {"temperature": 0.0},
    r"ValueError: mask: expected shape logits.shape\[:-1\] = \[2\], got \[3\]": {
        "mask": torch.ones(3)
    },
    "ValueError: reduction: expected": {"reduction": "batchmean"},
}


@pytest.mark.parametrize("error", BAD)
def test_bad_input(error: str) -> None:
    with raises(error):
        partita.divergence(**{"logits": X, "teacher_logits": T, **BAD[error]})
