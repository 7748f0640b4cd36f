"""Tests that need a GPU: capture, streams, devices, huge tensors, memory, no synchronisation."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.rows import OPS, check_loss, check_op, check_stats, leaf, targets_for
from torch import Tensor

import partita
from partita.testing import EDGES, edge_rows, sample_rows

pytestmark = pytest.mark.gpu

ALL = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: (lambda x, t, op=op: op.ours(x, -1)) for name, op in OPS.items()},
    "cross_entropy": partita.cross_entropy,
    "cross_entropy, none": lambda x, t: partita.cross_entropy(x, t, reduction="none"),
    "cross_entropy, all": lambda x, t: partita.cross_entropy(x, t, torch.ones_like(x[0]), **ALL),
    "token_stats": lambda x, t: torch.stack(partita.token_stats(x, t)[:3]),
}


@pytest.mark.parametrize("columns", [5000, 131073])
@pytest.mark.parametrize("edge", EDGES)
def test_edges_at_every_width(edge: str, columns: int) -> None:
    x = edge_rows(edge, 6, columns, dtype=torch.bfloat16, device="cuda")
    for op in OPS.values():
        check_op(op, x, -1)
    target = targets_for(x, "labels", ignored=-100)
    for reduction in ("none", "mean"):
        check_loss(x, target, reduction=reduction)
    check_stats(x, target)
    if "inf" not in edge and len(x):
        check_loss(x, target, reduction="none", **ALL)


@pytest.mark.parametrize("columns", [2**20, 2**20 + 1])
def test_a_million_columns(columns: int) -> None:
    x = 3 * sample_rows(3, columns, dtype=torch.bfloat16, device="cuda")
    for op in OPS.values():
        check_op(op, x, -1)
    target = targets_for(x, "labels", ignored=-100)
    check_loss(x, target)
    check_loss(x, target, reduction="none", **ALL)
    check_loss(x, targets_for(x, "probabilities"))
    check_stats(x, target)


@pytest.mark.whole_gpu
@pytest.mark.parametrize("shape", [(70_000, 5), (3 * 65_536 + 1, 300)], ids=str)
def test_more_rows_than_a_grid_dimension_holds(shape: tuple[int, int]) -> None:
    x = sample_rows(*shape, device="cuda")
    for op in OPS.values():
        check_op(op, x, -1)
        check_op(op, x.T.contiguous(), 0)
    target = targets_for(x, "labels", ignored=-100)
    check_loss(x, target, **ALL)
    check_stats(x, target)


def test_more_than_65535_pixels() -> None:
    x = sample_rows(2, 5 * 300 * 301, device="cuda").reshape(2, 5, 300, 301)
    check_loss(x, targets_for(x, "labels", ignored=-100), **ALL)


@pytest.mark.whole_gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("columns", [32_768, 511])
def test_more_than_2_to_the_31_elements(columns: int, name: str) -> None:
    """Rows at both ends have the results that they have in a tensor of their own."""
    rows = 2**31 // columns + 70
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    ends = torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device="cuda")
    target = torch.randint(columns, (rows,), device="cuda")
    few = x.detach()[ends].requires_grad_()

    def ends_of(x: Tensor, target: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        result = CALLS[name](x, target)
        (grad,) = torch.autograd.grad(result, x, torch.ones_like(result))
        mean = result.ndim == 0
        return (result if mean or len(result) != len(x) else result[ends]), grad[ends].float() * (
            len(x) if mean else 1
        )

    ours, expected = ends_of(x, target, ends), ends_of(few, target[ends], torch.arange(len(ends)))
    torch.testing.assert_close(ours[1], expected[1], rtol=2**-7, atol=1e-6)
    if ours[0].ndim and ours[0].shape == expected[0].shape:
        torch.testing.assert_close(ours[0], expected[0], rtol=2**-7, atol=1e-6)
    assert ours[0].isfinite().all()


@pytest.mark.whole_gpu
def test_strides_beyond_2_to_the_31() -> None:
    """There are few elements, far apart."""
    x = torch.zeros(2**31 + 4096, device="cuda", dtype=torch.float16).as_strided(
        (3, 64), (2**30, 1)
    )
    x.copy_(sample_rows(3, 64, dtype=torch.float16, device="cuda"))
    for op in OPS.values():
        check_op(op, x, -1, few=True)
    check_loss(x, targets_for(x, "labels"), few=True)
    check_stats(x, targets_for(x, "labels"), few=True)
    columns = x.T
    check_op(OPS["softmax"], columns, 0, few=True)


@pytest.mark.parametrize(("inplace", "buffers"), [(False, 1), (True, 0)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("columns", [8192, 50257, 131_072])
def test_peak_memory_of_cross_entropy(
    columns: int, reduction: str, inplace: bool, buffers: int
) -> None:
    """The loss needs one buffer of the size of the logits, or none.

    The memory for the rows is a hundredth of such a buffer.

    The caching allocator rounds an allocation above 10 MiB up to a multiple of 2 MiB.
    """
    base = sample_rows(512, columns, dtype=torch.bfloat16, device="cuda").requires_grad_()
    target = targets_for(base, "labels")
    upstream = torch.ones(512 if reduction == "none" else (), device="cuda", dtype=torch.bfloat16)
    logits = base * 1
    size = logits.numel() * logits.element_size()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = partita.cross_entropy(logits, target, reduction=reduction, inplace=inplace)
    (grad,) = torch.autograd.grad(loss, logits, upstream)
    assert grad.shape == logits.shape
    granule = 2 * 2**20
    assert (
        torch.cuda.max_memory_allocated() - before
        <= buffers * -(-size // granule) * granule + 0.01 * size
    )


@pytest.mark.parametrize("columns", [300, 131_072])
def test_fp16_with_a_grad_scaler(columns: int) -> None:
    x = leaf(64, columns, device="cuda")
    target = targets_for(x, "labels")
    scaler = torch.amp.GradScaler("cuda", init_scale=65536.0)
    with torch.autocast("cuda", torch.float16):
        loss = partita.cross_entropy(x.half(), target)
    scaler.scale(loss).backward()
    exact = x.detach().half().double().requires_grad_()
    F.cross_entropy(exact, target).backward()
    torch.testing.assert_close(
        x.grad.double() / 65536.0, exact.grad, rtol=2**-10, atol=2**-24 / 65536
    )


@pytest.mark.parametrize("columns", [100, 5000, 131_072])
def test_many_concurrent_rows_do_not_deadlock(columns: int) -> None:
    """More programs run than fit on the device at once, and other streams run theirs too."""
    x = sample_rows(2000, columns, dtype=torch.bfloat16, device="cuda")
    target = targets_for(x, "labels")
    expected = partita.softmax(x), partita.cross_entropy(x, target)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append((partita.softmax(x), partita.cross_entropy(x, target)))
    torch.cuda.synchronize()
    assert all(
        torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True)
    )


@pytest.mark.multigpu
def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^target: expected the device of input, cuda:0, got cuda:1$"
    ):
        partita.cross_entropy(
            torch.zeros(2, 3, device="cuda:0"), torch.zeros(2, dtype=torch.int64, device="cuda:1")
        )
