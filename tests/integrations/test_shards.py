"""Fused models that DeepSpeed or transformers shards over two processes.

`tests/helpers/rank_shards.py` has the checks that need PyTorch alone, which `test_parallel` starts.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.catalogue import one_rank
from helpers.rank_processes import launch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from partita.integrations.transformers import linear_causal_lm_loss

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch has no torch.distributed"
)


@pytest.mark.parametrize("library", ["deepspeed", "transformers"])
def test_library(library: str, tmp_path: Path) -> None:
    if find_spec(library) is None:  # an import would stay in the process of the other tests
        pytest.skip(f"{library} is not installed")
    for code, output in launch("cpu", (2,), library, tmp_path / "store"):
        assert code == 0, output[-4000:]
        assert output.count("passed") == 1


def test_items_divide_before_gradients_are_rounded() -> None:
    """The gradient of the sum overflows fp16, and that of the quotient does not."""
    hidden = torch.full((1, 512, 16), 500.0, dtype=torch.float16).requires_grad_()
    matrix = torch.zeros(64, 16, dtype=torch.float16).requires_grad_()
    labels = torch.zeros(1, 512, dtype=torch.int64)

    def gradients(states: Tensor, weight: Tensor, items: int) -> tuple[Tensor, ...]:
        loss = linear_causal_lm_loss(states, weight, labels, items, memory_budget=2**20)
        return torch.autograd.grad(loss, (hidden, matrix))

    expected = gradients(hidden, matrix, 300)
    with one_rank("cpu"):
        mesh = init_device_mesh("cpu", (1,))
        sharded = (
            DTensor.from_local(hidden, mesh, [Replicate()]),
            DTensor.from_local(matrix, mesh, [Shard(0)]),
        )
        found = gradients(*sharded, 300)
        assert gradients(*sharded, 1)[1].isinf().any()
    assert float(expected[1].abs().max()) > 800
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)
