"""Vocabulary-parallel losses in several processes, which use Gloo on the CPU and NCCL on GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.catalogue import one_rank
from helpers.rank_processes import launch
from helpers.ranks import PARTS, checks
from helpers.rows import INTERPRETING
from torch import Tensor

import partita
from partita import parallel
from partita.ops.divergence.common import TermOptions
from partita.ops.linear_heads.common import RowOptions
from partita.ops.vocab_parallel import reference
from partita.ops.vocab_parallel.common import packed_size
from partita.ops.vocab_parallel.divergence import merged_rows
from partita.primitives.rows import chunks
from partita.testing import sample_rows
from partita.testing.samples import Draw

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch has no torch.distributed"
)
CPU_WORLDS = (2,) if INTERPRETING else (2, 3, 4)
WORLDS = [pytest.param("cpu", CPU_WORLDS, "all", marks=pytest.mark.interpreted)]
WORLDS += [
    pytest.param("cuda", (world,), str(part), marks=pytest.mark.multigpu)
    for world in (2, 4)
    for part in range(PARTS)
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "worlds", "what"), WORLDS, ids=str)
def test_every_rank(kind: str, worlds: tuple[int, ...], what: str, tmp_path: Path) -> None:
    if kind == "cuda" and torch.cuda.device_count() < max(worlds):
        pytest.skip(f"needs {max(worlds)} GPUs")
    ranks = launch(kind, worlds, what, tmp_path / "store")
    worlds_of_ranks = [world for world in worlds for _ in range(world)]
    for world, (code, output) in zip(worlds_of_ranks, ranks, strict=True):
        assert code == 0, output[-4000:]
        assert output.count("passed") == len(checks(what, world))


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_a_rank_that_raises_does_not_leave_the_others_hanging(kind: str, tmp_path: Path) -> None:
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    (code, output), (failing_code, failing_output) = launch(kind, (2,), "fail", tmp_path / "store")
    assert failing_code != 0 and "this rank does not take part" in failing_output
    assert code != 0 and "RuntimeError" in output
    assert kind == "cpu" or "a rank did not reach the loss" in output


@pytest.fixture
def own_group() -> Iterator[None]:
    with one_rank("cpu"):
        yield


@pytest.mark.interpreted
@pytest.mark.usefixtures("own_group")
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergences_in_fp64(beta: float) -> None:
    """They have a gradient, and a teacher or a student in fp32 costs no digits."""
    x, t = sample_rows(3, 9), sample_rows(3, 9, seed=1)
    exact = x.double().requires_grad_()
    expected = partita.divergence(exact, t.double(), beta=beta, softcap=5.0)
    (true,) = torch.autograd.grad(expected, exact)
    for pair in ((x.double(), t.double()), (x.double(), t), (x, t.double())):
        leaf = pair[0].clone().requires_grad_()
        loss = parallel.divergence(leaf, pair[1], beta=beta, softcap=5.0)
        (grad,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(grad, true.to(grad.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merged_rows_have_bits_of_their_own(dtype: torch.dtype) -> None:
    """They are sums over the ranks, which PyTorch adds up in an order that follows the shape."""
    draw, options = Draw(dtype), RowOptions(0.7, 0.0, -100, True, True)
    gathered = draw.scores(8, packed_size(True, True), 33).detach()
    gathered[:, 1] = gathered[:, 1].exp()
    gathered[:, 3], gathered[:, 6] = 10, 8.3  # classes of a rank, and the sum of their weights
    distillation = TermOptions(*[True] * 6, 0.5, 0.7, 0.0, -100)
    target = draw.labels(0, 80, 33)

    def merged(rows: slice) -> tuple[Tensor, ...]:
        part, place = gathered[..., rows].contiguous(), (80, 0, 0)
        fields = reference.parallel_fields(part, target[rows], *place, options)
        states = part[:, : sum(distillation.exchanged)].movedim(1, -1)
        terms, sums, means, argmax = merged_rows(states, target[rows], 80, distillation, True)
        return *fields, *terms, *sums, *means, argmax

    together = merged(slice(33))
    for size in (1, 2, 7):
        for part in chunks(33, size):
            for found, expected in zip(merged(part), together, strict=True):
                assert torch.equal(found.nan_to_num(7.0), expected[part].nan_to_num(7.0))


@pytest.mark.usefixtures("own_group")
def test_ops_of_one_device_refuse_a_dtensor() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    x, ids = torch.zeros(2, 3), torch.tensor([[0], [1]])
    sharded = dist.tensor.DTensor.from_local(x, mesh, [dist.tensor.Shard(1)])
    labels = dist.tensor.DTensor.from_local(ids[:, 0], mesh, [dist.tensor.Replicate()])
    for name, call in {
        "input": lambda: partita.cross_entropy(sharded, ids[:, 0]),
        "target": lambda: partita.cross_entropy(x, labels),
        "logits": lambda: partita.token_stats(sharded, ids[:, 0]),
        "teacher_logits": lambda: partita.divergence(x, sharded),
        "linear_weight": lambda: partita.linear_logprobs(x, sharded, ids),
    }.items():
        message = f"^{name}: expected a plain Tensor, got a DTensor; .* partita.parallel"
        with pytest.raises(TypeError, match=message):
            call()


def test_no_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised"):
        parallel.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.gpu
@pytest.mark.usefixtures("own_group")
def test_gloo_is_refused_on_a_gpu() -> None:
    logits, target = torch.zeros(2, 3, device="cuda"), torch.tensor([0, 1], device="cuda")
    message = "group: expected NCCL for tensors on cuda:0, got Gloo"
    for call in (parallel.cross_entropy, parallel.token_stats):
        with pytest.raises(RuntimeError, match=message):
            call(logits, target)


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
