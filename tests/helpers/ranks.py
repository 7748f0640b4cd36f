"""The process of one rank in the tests of vocabulary-parallel losses; `test_parallel` starts it."""

import datetime
import sys

import torch
import torch.distributed as dist
from helpers.rank_dtensors import (
    check_arguments_with_a_dtensor,
    check_dtensor,
    check_uneven_batch,
    check_wrappers,
)
from helpers.rank_losses import (
    check_bad_arguments,
    check_compile,
    check_corners,
    check_cross_entropy,
    check_linear,
    check_token_stats,
    check_unfinished_collective,
)
from helpers.rank_symmetric_memory import check_symmetric_memory
from helpers.rows import INTERPRETING

from partita import parallel

CHECKS = (
    check_cross_entropy,
    check_linear,
    check_corners,
    check_token_stats,
    check_bad_arguments,
    check_dtensor,
    check_arguments_with_a_dtensor,
    check_wrappers,
    check_uneven_batch,
    check_unfinished_collective,
    check_compile,
    check_symmetric_memory,
)


def fail_alone(device: torch.device) -> None:
    """Let the last rank raise before the second call; the others raise within the timeout."""
    logits = torch.zeros(2, 3, device=device, requires_grad=True)
    target = torch.zeros(2, dtype=torch.int64, device=device)
    assert parallel.cross_entropy(logits, target).isfinite()
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this rank does not take part")
    # Kernels that wait for the rank return NaN. A gather raises here.
    assert parallel.cross_entropy(logits, target).isnan()
    parallel.cross_entropy(logits, target)


def main(rank: int, world: int, store: str, kind: str, what: str) -> None:
    torch.set_num_threads(1)
    if INTERPRETING:
        from helpers.interpreter import make_interpreter_faster

        make_interpreter_faster()
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=6 if what == "fail" else 120)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    for check in (fail_alone,) if what == "fail" else CHECKS:
        check(device)
        print(f"rank {rank}: {check.__name__} passed", flush=True)
    dist.barrier()  # no rank leaves while another still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
