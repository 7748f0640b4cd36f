"""The GPU functions of CTC do nothing that a replay cannot repeat, as it is launches alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.rows import INTERPRETING
from torch.utils._python_dispatch import TorchDispatchMode

from partita.ops.ctc.common import CTCInputs

pytest.importorskip("triton")
from helpers.launches import Launch, recording

pytestmark = pytest.mark.skipif(INTERPRETING, reason="kernels are functions of Python there")

# What a replay can repeat: allocations, fills, and views.
REPLAYABLE = {
    *("aten.empty.memory_format", "aten.zeros.default", "aten.zero_.default"),
    *("aten.fill_.Scalar", "aten.view.default", "aten.view.dtype", "aten.slice.Tensor"),
    *("aten.split_with_sizes.default", "aten.split.Tensor", "aten.detach.default"),
}


class Operations(TorchDispatchMode):
    """Collects the names of PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.fixture
def launched() -> Iterator[list[Launch]]:
    found: list[Launch] = []
    with recording(found, "13.0"):
        yield found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("N", "C", "S"), [(4, 20, 10), (3, 60, 40), (4, 5000, 10), (3, 500, 300)])
def test_a_call_is_launches_alone(
    N: int, C: int, S: int, from_logits: bool, dtype: torch.dtype, launched: list[Launch]
) -> None:
    from partita.ops.ctc.gpu import align, launch

    logits = torch.zeros(50, N, C, dtype=dtype)
    targets = (torch.ones(N * S).long(), torch.arange(N) * S, torch.ones(N).long() * 50)
    x = CTCInputs(logits, *targets, torch.ones(N).long() * S, S, 0, from_logits)
    with Operations() as operations:
        value, losses, saved = launch.ctc_loss(x, "mean", False, True)
        launch.ctc_gradient(value, x, losses, saved, "mean")
        launch.ctc_loss(x, "mean", False, False)
        align.ctc_align(x)
    assert set(operations.names) <= REPLAYABLE
    assert launched


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("C", "S"), [(20, 10), (5000, 10)])
def test_priors_and_a_star_make_no_copy_of_the_logits(
    C: int, S: int, from_logits: bool, launched: list[Launch]
) -> None:
    """The calls are launches alone, and save no more than for one more class."""
    from partita.ops.ctc.gpu import align, launch
    from partita.ops.ctc.gpu.plan import saved_shape

    logits, ones = torch.zeros(50, 4, C), torch.ones(4).long()
    targets = (torch.full((4 * S,), C + 1), torch.arange(4) * S, ones * 50, ones * S)
    x = CTCInputs(logits, *targets, S, 0, from_logits, torch.zeros(C), 0.5, C + 1)
    with Operations() as operations:
        value, losses, saved = launch.ctc_loss(x, "mean", False, True)
        launch.ctc_gradient(value, x, losses, saved, "mean")
        align.ctc_align(x)
    assert set(operations.names) <= REPLAYABLE
    assert saved.shape == saved_shape((50, 4, C + 1), S, True, "gpu")
    sizes = [
        arg.nbytes
        for launch in launched
        for arg in launch.values
        if isinstance(arg, torch.Tensor) and arg.data_ptr() != saved.data_ptr()
    ]
    assert max(sizes) <= max(logits.nbytes, saved.nbytes)
