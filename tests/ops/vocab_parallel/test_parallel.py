"""Vocabulary-parallel losses in several processes, which use Gloo on the CPU and NCCL on GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import CHECKS

from partita import parallel

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch has no torch.distributed"
)
WORLDS = [
    pytest.param("cpu", 2, marks=pytest.mark.interpreted),
    pytest.param("cpu", 3),
    pytest.param("cpu", 4),
]
WORLDS += [pytest.param("cuda", world, marks=pytest.mark.multigpu) for world in (2, 4)]


def launch(kind: str, world: int, what: str, store: Path) -> list[tuple[int, str]]:
    """Run a process for each rank, and return their exit codes and outputs."""
    script = str(Path(__file__).parents[2] / "helpers/ranks.py")
    path = os.pathsep.join(filter(None, sys.path))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
    }
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "env": environment,
    }
    command = [sys.executable, "-W", "ignore", script]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), str(store), kind, what], **pipes)
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, outputs, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "world"), WORLDS)
def test_every_rank(kind: str, world: int, tmp_path: Path) -> None:
    if kind == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    for code, output in launch(kind, world, "all", tmp_path / "store"):
        assert code == 0, output[-4000:]
        assert output.count("passed") == len(CHECKS)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_a_rank_that_raises_does_not_leave_the_others_hanging(kind: str, tmp_path: Path) -> None:
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    (code, output), (failing_code, failing_output) = launch(kind, 2, "fail", tmp_path / "store")
    assert failing_code != 0 and "this rank does not take part" in failing_output
    assert code != 0 and "RuntimeError" in output
    assert kind == "cpu" or "a rank did not reach the loss" in output


def test_no_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised"):
        parallel.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.gpu
def test_gloo_is_refused_on_a_gpu(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        logits, target = torch.zeros(2, 3, device="cuda"), torch.tensor([0, 1], device="cuda")
        for call in (parallel.cross_entropy, parallel.token_stats):
            with pytest.raises(
                RuntimeError, match=r"group: expected NCCL for tensors on cuda:0, got Gloo"
            ):
                call(logits, target)
    finally:
        dist.destroy_process_group()


def test_balanced() -> None:
    work = [((7 * i) % 31 + 1) ** 2 for i in range(50)]
    for ranks in (1, 3, 4, 60):
        found = parallel.balanced(torch.tensor(work), ranks)
        assert sorted(index for own in found for index in own) == list(range(50))
        assert max(map(len, found)) - min(map(len, found)) <= 1
        loads = [sum(work[i] for i in own) for own in found]
        assert max(loads) - min(loads) <= max(work)
    assert parallel.balanced([], 2) == [[], []]
    with pytest.raises(ValueError, match="ranks: expected at least 1, got 0"):
        parallel.balanced(work, 0)
    with pytest.raises(ValueError, match="work: expected numbers"):
        parallel.balanced([1.0, float("nan")], 2)
