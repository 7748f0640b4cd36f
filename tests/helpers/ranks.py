"""The ranks in the tests of vocabulary-parallel losses; `test_parallel` starts this script.

One process imports all modules and forks the ranks. On GPUs each rank imports them itself.
"""

import datetime
import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from helpers import (
    rank_catalogue,
    rank_distillation,
    rank_dtensors,
    rank_engines,
    rank_invariance,
    rank_losses,
    rank_models,
    rank_pairs,
    rank_shards,
    rank_supports,
)
from helpers.rows import INTERPRETING

import partita
from partita import parallel

CHECKS = (
    rank_losses.check_plain_collectives,
    rank_catalogue.check_catalogue,
    rank_losses.check_forms,
    rank_losses.check_sequence_parallel,
    rank_losses.check_corners,
    rank_losses.check_bad_arguments,
    rank_dtensors.check_dtensor,
    rank_dtensors.check_arguments_with_a_dtensor,
    rank_dtensors.check_wrappers,
    rank_dtensors.check_uneven_batch,
    rank_losses.check_unfinished_collective,
    rank_losses.check_compile,
    rank_losses.check_symmetric_memory,
    rank_invariance.check_invariance,
    rank_invariance.check_invariance_of_plans,
    rank_models.check_transducers,
    rank_shards.check_fused_models,
    rank_shards.check_tensor_parallel_heads,
    rank_shards.check_refused_shards,
    rank_shards.check_pipeline,
    rank_supports.check_invalid_supports,
    rank_supports.check_bits_of_supports,
    rank_pairs.check_pairs_against_open_clip,
    rank_pairs.check_pairs_of_wrapped_models,
    rank_pairs.check_pairs_beside_hard_negatives,
    rank_pairs.check_compiled_and_frozen_pairs,
    rank_pairs.check_refused_pairs,
    rank_distillation.check_distillation,
    rank_distillation.check_rows_without_terms,
    rank_distillation.check_bad_distillation,
)


# The checks of models that another library wraps or shards.
LIBRARIES = {
    "deepspeed": rank_engines.check_deepspeed,
    "transformers": rank_engines.check_plan_of_transformers,
}

# Checks that run in one world on the CPU, as others tell no more. A compiler traces the same
# collectives in each. The sum of two ranks has one order, and three add up in the order of more.
ONE_WORLD = {rank_losses.check_compile: 2, rank_pairs.check_compiled_and_frozen_pairs: 2}
ONE_WORLD[rank_invariance.check_invariance] = 2 if INTERPRETING else 3

# The checks are parted on GPUs, where most of the time goes into the compilation of kernels.
PARTS = 3


def checks(what: str, world: int) -> tuple[Callable[[torch.device], None], ...]:
    """Return the checks that the ranks of a world run.

    They are "all", those of one of the PARTS, the one of a library, or "fail".
    """
    if what in LIBRARIES:
        return (LIBRARIES[what],)
    if what == "fail":
        return (fail_alone,)
    if what == "all":
        return tuple(check for check in CHECKS if world == ONE_WORLD.get(check, world))
    return CHECKS[int(what) :: PARTS]


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


def run_rank(rank: int, world: int, store: str, kind: str, what: str) -> None:
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
    for check in checks(what, world):
        check(device)
        print(f"rank {rank}: {check.__name__} passed", flush=True)
    dist.barrier()  # no rank leaves while another still communicates
    dist.destroy_process_group()


def compile_a_training_step() -> None:
    """Import what a compilation needs, and fill its caches, before the ranks are forked."""
    function = torch.compile(partita.cross_entropy, backend="aot_eager", fullgraph=True)
    logits = torch.zeros(2, 3, requires_grad=True)
    function(logits, torch.tensor([0, 1]), label_smoothing=0.1).backward()
    torch._dynamo.reset()


def start(rank: int, world: int, store: str, kind: str, what: str) -> int:
    """Start the process of a rank, which writes to the file of its rank, and return its id."""
    if child := os.fork():
        return child
    output = os.open(f"{store}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if kind == "cuda":  # CUDA does not work in a fork of a process that has looked for GPUs.
        command = [sys.executable, "-W", "ignore", __file__, str(world), store, kind, what]
        os.execv(sys.executable, [*command, str(rank)])
    code = 1
    try:
        run_rank(rank, world, store, kind, what)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(worlds: str, store: str, kind: str, what: str) -> None:
    """Run all ranks of one world after another, and print their exit codes, a line for each."""
    # A build of PyTorch for GPUs starts threads for gradients, which a fork does not have.
    if kind == "cpu" and what == "all" and not torch.backends.cuda.is_built():
        compile_a_training_step()
    for world in map(int, worlds.split(",")):
        ranks = [start(rank, world, f"{store}.{world}", kind, what) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(*codes, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 6:
        world, store, kind, what, rank = sys.argv[1:]
        run_rank(int(rank), int(world), store, kind, what)
    else:
        main(*sys.argv[1:])
