"""Fused models that DeepSpeed or transformers shards over two processes.

`tests/helpers/rank_shards.py` has the checks that need PyTorch alone, which `test_parallel` starts.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.rank_processes import launch

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
