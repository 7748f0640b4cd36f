"""Cross-entropy by each way of a call: PyTorch's function, one pass, and fused reductions."""

import pytest
import torch
from helpers.rows import check_loss, class_weights, devices, dtypes, leaf, targets_for

import partita
from partita.ops.cross_entropy.gpu.plan import FUSED_ROWS, fused_block
from partita.testing import EDGES, edge_rows, sample_rows

CLASSES = 37
NUMBERS = [
    {},
    {"z_loss": 1e-3},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3},
]
numbers = pytest.mark.parametrize("numbers", NUMBERS, ids=["plain", "z_loss", "smoothing", "all"])


@dtypes
@numbers
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_reference_against_fp64(
    weighted: bool, reduction: str, inplace: bool, numbers: dict, dtype: torch.dtype
) -> None:
    """On the CPU PyTorch serves small losses, so the reference needs a test of its own."""
    logits = 3 * sample_rows(16, CLASSES, dtype=dtype)
    weight = class_weights(CLASSES, dtype, "cpu") if weighted else None
    target = targets_for(logits, "labels", ignored=-100)
    options = {"reduction": reduction, "inplace": inplace, **numbers}
    with partita.backend("reference"):
        check_loss(logits, target, weight, **options)


@dtypes
@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_the_reference(edge: str, dtype: torch.dtype) -> None:
    logits = edge_rows(edge, 16, CLASSES, dtype=dtype, device="cpu")
    with partita.backend("reference"):
        for reduction in ("mean", "sum"):
            check_loss(logits, targets_for(logits, "labels"), reduction=reduction)


@pytest.mark.parametrize("gap", [60.0, 75.0, 95.0, 300.0])
def test_the_reference_with_a_label_that_is_very_improbable(gap: float) -> None:
    """The probability of such a label is rounded to a denormal number or to 0."""
    logits = sample_rows(4, CLASSES)
    logits[1:, 3] -= gap
    target = torch.tensor([0, 3, 3, 1])
    with partita.backend("reference"):
        check_loss(logits, target, reduction="sum")


@pytest.mark.parametrize("layout", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_the_reference_with_rows_of_any_layout(inplace: bool, layout: tuple[int, ...]) -> None:
    order = [layout.index(i) for i in range(3)]
    x = sample_rows(2 * CLASSES, 5).reshape(2, CLASSES, 5).permute(layout).contiguous()
    logits = x.permute(order)
    with partita.backend("reference"):
        check_loss(logits, targets_for(logits, "labels", ignored=-100), inplace=inplace)


def test_the_limits_of_the_fused_kernel() -> None:
    assert fused_block(0, 0, CLASSES) == 0
    assert fused_block(8, 1, CLASSES) == 128
    assert fused_block(128, 128, CLASSES) == 128
    assert fused_block(129, 3, CLASSES) == FUSED_ROWS
    assert fused_block(100, 200, CLASSES) == FUSED_ROWS
    assert fused_block(FUSED_ROWS + 1, 3, CLASSES) == 0
    assert fused_block(FUSED_ROWS, FUSED_ROWS, 2**13) == 0


@pytest.mark.interpreted
@devices
@numbers
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("rows", "classes"), [(3, 20), (40, 100), (150, 40), (5, 4100)])
def test_one_or_many_programs_reduce_the_loss(
    rows: int, classes: int, reduction: str, numbers: dict, device: str
) -> None:
    logits = sample_rows(rows, classes, device=device)
    weight = class_weights(classes, torch.float32, device)
    target = targets_for(logits, "labels", ignored=-100)
    check_loss(logits, target, weight, reduction=reduction, few=True, **numbers)
    probabilities = targets_for(logits, "probabilities")
    check_loss(logits, probabilities, reduction=reduction, few=True, **numbers)


@pytest.mark.interpreted
@devices
def test_fused_and_separate_reductions_agree(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from partita.ops.cross_entropy.gpu import launch

    x = leaf(50, 100, device=device)
    target = targets_for(x.detach(), "labels", ignored=-100)
    results = []
    for block in (launch.fused_block, lambda *_: 0):
        monkeypatch.setattr(launch, "fused_block", block)
        loss = partita.cross_entropy(x, target)
        results.append((loss.detach(), *torch.autograd.grad(loss, x)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_row_gradients_that_rows_share(z_loss: float, device: str) -> None:
    x = leaf(6, CLASSES, device=device)
    target = targets_for(x.detach(), "labels")
    losses = partita.cross_entropy(x, target, reduction="none", z_loss=z_loss)
    shared, full = (
        torch.autograd.grad(losses, x, upstream, retain_graph=True)[0]
        for upstream in (torch.tensor(1.5, device=device).expand(6), torch.full_like(losses, 1.5))
    )
    assert torch.equal(shared, full)
