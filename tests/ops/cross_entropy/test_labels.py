"""Labels out of range raise where labels are checked, and make their row NaN elsewhere."""

from collections.abc import Callable

import pytest
import torch
from helpers.rows import class_weights, devices
from torch import Tensor

import partita
from partita.testing import Labelled, sample_labels

CLASSES = 37
OUT_OF_RANGE = [-1, CLASSES, -101, 2**40, -(2**63), 2**63 - 1]


def stats(logits: Tensor, target: Tensor) -> Tensor:
    return torch.stack(partita.token_stats(logits, target)[:3], -1)


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda x, t: partita.cross_entropy(x, t, reduction="none"),
    "none, all options": lambda x, t: partita.cross_entropy(
        x,
        t,
        class_weights(CLASSES, x.dtype, x.device),
        reduction="none",
        label_smoothing=0.1,
        softcap=5.0,
        z_loss=1e-3,
    ),
    "sum": lambda x, t: partita.cross_entropy(x, t, reduction="sum"),
    "mean": lambda x, t: partita.cross_entropy(x, t, z_loss=1e-3),
    "mean, inplace": lambda x, t: partita.cross_entropy(x.clone(), t, inplace=True),
    "token_stats": stats,
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def sample(device: str) -> Labelled:
    return sample_labels(6, CLASSES, device=device)


def run(
    call: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    x = logits.clone().requires_grad_()
    result = call(x, target)
    return result, torch.autograd.grad(result, x, torch.full_like(result, 1.5))[0]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("label", OUT_OF_RANGE)
@calls
def test_an_unchecked_label_affects_its_own_row_only(
    call: Callable, label: int, device: str
) -> None:
    logits, labels = sample(device)
    expected, expected_grad = run(call, logits, labels)
    invalid_labels = labels.clone()
    invalid_labels[2] = label
    result, grad = run(call, logits, invalid_labels)
    others = [0, 1, 3, 4, 5]
    assert grad[2].isnan().all()
    assert torch.equal(grad[others], expected_grad[others])
    if result.ndim:
        assert result[2].isnan().all()
        assert torch.equal(result[others], expected[others])
    else:
        assert result.isnan()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.interpreted
@devices
def test_the_argmax_of_an_unchecked_label_is_as_usual(device: str) -> None:
    logits, labels = sample(device)
    labels[2] = CLASSES
    assert torch.equal(partita.token_stats(logits, labels).argmax, logits.argmax(-1))


@pytest.mark.parametrize(
    ("device", "setting"),
    [("cpu", None), ("cpu", ""), ("cpu", "1"), pytest.param("cuda", "1", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("label", OUT_OF_RANGE)
@calls
def test_a_checked_label_raises_with_its_index(
    call: Callable, label: int, device: str, setting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARTITA_CHECK", raising=False)
    if setting is not None:
        monkeypatch.setenv("PARTITA_CHECK", setting)
    logits, labels = sample(device)
    labels[2], labels[4] = label, 99
    message = (
        rf"target: expected labels from 0 to {CLASSES - 1} \(or ignore_index -100\),"
        rf" got {label} at \[2\]"
    )
    with pytest.raises(IndexError, match=f"^{message}$"):
        call(logits.requires_grad_(), labels)


def test_the_index_in_several_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTITA_CHECK", raising=False)
    target = torch.zeros(2, 3, 4, dtype=torch.int64)
    target[1, 2, 3] = 5
    with pytest.raises(IndexError, match=r"got 5 at \[1, 2, 3\]"):
        partita.cross_entropy(torch.zeros(2, 5, 3, 4), target)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_no_label_wraps_around(dtype: torch.dtype) -> None:
    """Check that bounds are compared in int64.

    In uint8, -100 is 156: the default ignore_index must not hide that label. Nor must the number of
    classes be cast to the dtype of the labels.
    """
    labels = torch.tensor([0, 156 if dtype == torch.uint8 else -3], dtype=dtype)
    with pytest.raises(IndexError, match=r"at \[1\]"):
        partita.cross_entropy(torch.zeros(2, 100), labels)
    assert partita.cross_entropy(
        torch.zeros(2, 300), torch.tensor([0, 100], dtype=dtype)
    ).isfinite()


@pytest.mark.gpu
@calls
def test_gpu_default_is_unchecked(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTITA_CHECK", raising=False)
    logits, labels = sample("cuda")
    labels[2] = CLASSES
    _, grad = run(call, logits, labels)
    assert grad[2].isnan().all()
    assert grad[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.gpu
def test_a_check_during_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = sample("cuda")
    partita.cross_entropy(logits, labels)
    monkeypatch.setenv("PARTITA_CHECK", "1")
    with (
        pytest.raises(RuntimeError, match="PARTITA_CHECK=1 reads tensors on the host"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        partita.cross_entropy(logits, labels)


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "yes")
    with pytest.raises(ValueError, match=r"^PARTITA_CHECK: expected 0, 1 or nothing, got 'yes'$"):
        partita.cross_entropy(*sample("cpu"))
