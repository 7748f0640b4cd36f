"""Losses of batches whose number of rows changes have the bits of calls without a program."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.ops.cross_entropy.autograd import cross_entropy_one_pass_op, scale_gradient
from partita.runtime import caches, launcher

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FIRST_ROWS = (*range(2, 12), *range(16, 144, 16), 129, 130, 131, 132, *range(144, 240, 16))
MORE_ROWS = (2, 3, 15, 16, 17, 64, 100, 127, 128, 129, 133, 256, 399, 1000, 1008, 1023, 1024)
OTHER_ROWS = (1, 0, 1025, 1040, 3000)

Result = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    launcher.module()
    caches.clear_caches()
    yield
    caches.clear_caches()


class Batches:
    """Batches of any number of rows, the same each time."""

    def __init__(self, width: int, dtype: torch.dtype, **options: Any) -> None:
        self.options = options
        generator = torch.Generator(DEVICE).manual_seed(0)
        shape = 3000, width
        self.logits = torch.randn(shape, generator=generator, device=DEVICE).to(dtype)
        self.target = torch.randint(width, (3000,), generator=generator, device=DEVICE)
        self.target[::7] = -100

    def run(self, rows: int, scale: float = 1.0) -> Result:
        """Return the loss and the gradient, in memory that had NaN before."""
        poison = torch.full((2 * rows * self.logits.shape[1] + 1024,), torch.nan, device=DEVICE)
        del poison
        logits = self.logits[:rows].detach().requires_grad_()
        loss = partita.cross_entropy(logits, self.target[:rows], **self.options)
        (loss * scale if scale != 1.0 else loss).backward()
        assert logits.grad is not None
        return loss.detach(), logits.grad


def assert_same(found: Result, expected: Result) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1000, 1024, 777])
def test_bits_of_each_number_of_rows(
    width: int, dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Batches(width, dtype)
    numbers = (*FIRST_ROWS, *MORE_ROWS, *OTHER_ROWS)
    monkeypatch.setenv("PARTITA_REPLAY", "0")
    expected = {rows: batches.run(rows, scale) for rows in numbers}
    monkeypatch.delenv("PARTITA_REPLAY")
    for rows in FIRST_ROWS:
        assert_same(batches.run(rows, scale), expected[rows])
    served = [len(op.programs) for op in (cross_entropy_one_pass_op, scale_gradient)]
    for rows in MORE_ROWS:
        assert_same(batches.run(rows, scale), expected[rows])
    if cross_entropy_one_pass_op.replay() is not None:
        assert [len(op.programs) for op in (cross_entropy_one_pass_op, scale_gradient)] == served
    for rows in OTHER_ROWS:
        assert_same(batches.run(rows, scale), expected[rows])


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"label_smoothing": 0.1, "softcap": 20.0, "z_loss": 1e-3},
        {"ignore_index": 5},
    ],
    ids=str,
)
def test_options_of_ragged_batches_match_pytorch(options: dict[str, Any]) -> None:
    batches = Batches(300, torch.float32, **options)
    if "ignore_index" in options:
        batches.target[batches.target < 0] = 5
    for rows in (*FIRST_ROWS, *MORE_ROWS):
        found = batches.run(rows)
        with partita.backend("reference"):
            expected = batches.run(rows)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_captured_graph_has_the_rows_that_it_was_captured_with() -> None:
    batches = Batches(1000, torch.float32)
    for rows in FIRST_ROWS:
        batches.run(rows)
    x = batches.logits[:50].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        partita.cross_entropy(x.requires_grad_(), batches.target[:50]).backward()
    torch.cuda.synchronize()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = partita.cross_entropy(x, batches.target[:50])
        loss.backward()
    for rows in (3, 90, 1000):
        batches.run(rows)
    graph.replay()
    torch.cuda.synchronize()
    assert x.grad is not None
    assert_same((loss.detach(), x.grad), batches.run(50))
