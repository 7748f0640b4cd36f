"""Token statistics, forward and backward, against fp64 on memory poisoned with NaN."""

import pytest
import torch
from helpers.errors import raises
from helpers.rows import check_stats, devices, devices_and_dtypes, dtypes, targets_for

import partita
from partita.testing import EDGES, edge_rows, sample_labels, sample_rows
from partita.testing.samples import in_torch

CLASSES = 37


@pytest.mark.interpreted
@devices_and_dtypes
@pytest.mark.parametrize("edge", EDGES)
def test_against_fp64(edge: str, dtype: torch.dtype, device: str) -> None:
    logits = edge_rows(edge, 16, CLASSES, dtype=dtype, device=device)
    check_stats(logits, targets_for(logits, "labels", ignored=-100))


@pytest.mark.interpreted
@devices_and_dtypes
@pytest.mark.parametrize("edge", ["plain", "wide", "scattered_inf", "transposed", "framed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_soft_capping(temperature: float, edge: str, dtype: torch.dtype, device: str) -> None:
    logits = edge_rows(edge, 16, CLASSES, dtype=dtype, device=device)
    options = {"temperature": temperature, "softcap": 4.0}
    check_stats(logits, targets_for(logits, "labels", ignored=-100), few=True, **options)
    check_stats(logits, None, few=True, **options)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("width", [37, 300, 5000])
def test_arg_max_of_soft_capped_logits(width: int, device: str) -> None:
    """Logits that saturate are equal, and the lowest of them counts."""
    logits = sample_rows(4, width, device=device)
    logits[:, 11], logits[1:, 29] = 3000.0, 2000.0
    logits[3, :] = 500.0
    assert partita.token_stats(logits, softcap=3.0).argmax.tolist() == [11, 11, 11, 0]


@pytest.mark.interpreted
@devices_and_dtypes
@pytest.mark.parametrize("edge", EDGES)
def test_without_a_target_the_arg_max_is_the_target(
    edge: str, dtype: torch.dtype, device: str
) -> None:
    logits = edge_rows(edge, 16, CLASSES, dtype=dtype, device=device)
    check_stats(logits, None, temperature=0.7)
    if edge == "plain":
        x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        stats = partita.token_stats(x, temperature=0.7, ignore_index=int(logits[0].argmax()))
        same = partita.token_stats(y, stats.argmax, temperature=0.7)
        assert all(torch.equal(a, b) for a, b in zip(stats, same, strict=True))
        grads = [torch.autograd.grad(s.logprob.sum(), z) for s, z in ((stats, x), (same, y))]
        assert torch.equal(*(grad for (grad,) in grads))


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("temperature", [0.3, 3.0])
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_a_temperature_of_large_logits_loses_no_digits(
    offset: float, temperature: float, device: str
) -> None:
    """The maximum is subtracted before the division, which would round at 1e4 / temperature."""
    logits = offset + sample_rows(64, CLASSES, device=device)
    target = targets_for(logits, "labels")
    stats = partita.token_stats(logits, target, temperature=temperature)
    truth = in_torch.token_stats(logits.double(), target, temperature=temperature)
    for found, right in ((stats.logprob, truth[0]), (stats.entropy, truth[2])):
        torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-6)


WIDTHS = [pytest.param("cpu", width) for width in (1, 2, 3, 64, 129, 300)]
WIDTHS += [
    pytest.param("cuda", width, marks=pytest.mark.gpu)
    for width in (1, 2, 64, 300, 781, 4097, 8192, 16385, 50257, 131073, 262144)
]


@pytest.mark.interpreted
@dtypes
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("device", "width"), WIDTHS)
def test_widths_and_temperatures(
    width: int, device: str, temperature: float, dtype: torch.dtype
) -> None:
    logits = 3 * sample_rows(5 + 600 // width, width, dtype=dtype, device=device)
    check_stats(logits, targets_for(logits, "labels"), temperature=temperature)


@pytest.mark.interpreted
@devices
def test_argmax_takes_the_lowest_index_among_equals(device: str) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0], [3.0, 3.0, 3.0], [-torch.inf, 0.0, 0.0]], device=device
    ).repeat(1, 50)
    assert partita.token_stats(
        logits, torch.zeros(3, dtype=torch.int64, device=device)
    ).argmax.tolist() == [1, 0, 1]


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_argmax_is_a_class_whatever_the_logits(value: float, device: str) -> None:
    stats = partita.token_stats(
        torch.full((2, 70), value, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    )
    assert ((stats.argmax >= 0) & (stats.argmax < 70)).all()


@devices
def test_one_row_without_a_batch(device: str) -> None:
    logits, labels = sample_labels(1, CLASSES, device=device)
    single, batch = partita.token_stats(logits[0], labels[0]), partita.token_stats(logits, labels)
    assert all(a.shape == () and torch.equal(a, b[0]) for a, b in zip(single, batch, strict=True))


@devices
@pytest.mark.parametrize("field", ["logprob", "logsumexp", "entropy"])
def test_one_field_alone_is_differentiable(field: str, device: str) -> None:
    logits, labels = sample_labels(4, CLASSES, device=device)
    x, y = logits.clone().requires_grad_(), logits.clone().double().requires_grad_()
    getattr(partita.token_stats(x, labels), field).sum().backward()
    in_torch.token_stats(y, labels)[
        ("logprob", "logsumexp", "entropy").index(field)
    ].sum().backward()
    torch.testing.assert_close(
        x.grad.double(), y.grad, rtol=0, atol=4 * torch.finfo(torch.float32).eps
    )


X, T = sample_labels(4, 7)
BAD = {
    "TypeError: logits: expected a Tensor, got NoneType": {"logits": None},
    "TypeError: logits: expected a floating dtype, got torch.int64": {"logits": T},
    "TypeError: target: expected an integer dtype, got torch.float32": {"target": X},
    r"ValueError: logits: expected shape \[..., C\] with at least one class, got \[\]": {
        "logits": X[0, 0]
    },
    r"ValueError: logits: expected shape \[..., C\] with at least one class, got \[4, 0\]": {
        "logits": X[:, :0]
    },
    r"ValueError: target: expected shape logits.shape\[:-1\] = \[4\], got \[3\]": {"target": T[1:]},
    "ValueError: target: expected the device of logits, cpu, got meta": {"target": T.to("meta")},
    "ValueError: temperature: expected a number above 0.0, got 0.0": {"temperature": 0.0},
    "ValueError: temperature: expected a number above 0.0, got inf": {"temperature": float("inf")},
    "TypeError: temperature: expected a number, got Tensor": {"temperature": torch.ones(())},
    "ValueError: softcap: expected a number above 0.0, got 0.0": {"softcap": 0.0},
}


@pytest.mark.parametrize("error", BAD)
def test_refuses(error: str) -> None:
    with raises(f"{error}$"):
        partita.token_stats(**{"logits": X, "target": T, **BAD[error]})
