"""The parts of measure.py: the command that writes each table, and those that fill its caches."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
BENCH = "-m partita bench"


class Part(NamedTuple):
    """A part of the run.

    Fields:
        name: the name on the command line.
        command: the arguments of Python. `{table}` is the file that it writes, and `{out}` the
            folder where it writes several.
        table: the name of the file.
        limit: the seconds after which it is stopped.
        warm_up: commands that fill the caches for it.
        gib: about as much memory of the GPU as each warm-up takes.
    """

    name: str
    command: str
    table: str
    limit: int
    warm_up: tuple[str, ...] = ()
    gib: int = 10


def bench(
    name: str, arguments: str, limit: int, warm_up: Iterable[str] = (), gib: int = 10
) -> Part:
    """Return a part that `partita bench` measures; without warm-ups, it warms up itself."""
    commands = tuple(warm_up) or (arguments,)
    return Part(
        name,
        f"{BENCH} {arguments} --csv {{table}}",
        f"{name}.csv",
        limit,
        tuple(f"{BENCH} {each} --repetitions 1" for each in commands),
        gib,
    )


# Left out are PyTorch's loop over the steps of `chain`, which takes hundreds of times as long, its
# reference of transducers, which takes minutes, and torchaudio's alignment of 180,000 steps.
MANY_LOGITS = "--dtype bf16 --columns 131072 --elements 1073741824"
PARTS = (
    # These need no peer but torchaudio, koi, seqdist and others that are small.
    Part("first_calls", f"{HERE}/first_calls.py --out {{table}}", "first_calls.csv", 150),
    bench(
        "ctc",
        "ctc --dtype fp32 --peers torch,seqdist,koi",
        110,
        ["ctc --dtype fp32 --peers seqdist"],
    ),
    bench(
        "chain",
        "chain --peers koi,seqdist",
        90,
        [f"chain --dtype {dtype} --peers seqdist" for dtype in ("fp32", "bf16")],
    ),
    bench(
        "token_stats",
        f"token_stats logprobs {MANY_LOGITS} --peers torch,compile",
        60,
        [f"{op} {MANY_LOGITS} --peers compile" for op in ("token_stats", "logprobs")],
        gib=35,
    ),
    Part(
        "training_step",
        f"{HERE}/training_step.py --out {{table}}",
        "training_step.csv",
        80,
        (f"{HERE}/training_step.py --steps 1 --out {os.devnull}",),
        gib=36,
    ),
    Part("host", f"{BENCH} host --csv {{table}}", "host.csv", 70, (f"{BENCH} host --quick",)),
    Part(
        "eager",
        f"{HERE}/eager.py --out {{out}}",
        "eager.csv",
        220,
        tuple(
            f"{HERE}/eager.py --repetitions 1 --ops {ops}"
            for ops in (
                "linear_chain",
                "semi_markov",
                "rnnt",
                "ctc chain",
                "decode cross_entropy token_stats linear_cross_entropy",
            )
        ),
    ),
    bench(
        "linear_chain",
        "linear_chain --dtype fp32 --peers torch,torch-struct,pytorch-crf",
        80,
        ["linear_chain --dtype fp32 --peers ''"],
    ),
    bench(
        "rnnt",
        "rnnt --peers torchaudio",
        110,
        [f"rnnt --dtype {dtype} --peers ''" for dtype in ("fp32", "bf16")],
    ),
    bench("decode", "decode --peers koi,fast-ctc-decode,pyctcdecode", 60),
    bench(
        "semi_markov",
        "semi_markov --dtype fp32 --peers torch,torch-struct,flash-semicrf",
        80,
        ["semi_markov --dtype fp32 --peers flash-semicrf"],
    ),
    bench(
        "decode_cpu",
        "decode --device cpu --peers fast-ctc-decode,pyctcdecode,flashlight-text",
        60,
        ["decode --device cpu --quick --peers ''"],
    ),
    # These need QuACK, Liger and cut-cross-entropy.
    bench(
        "rows",
        "softmax cross_entropy --peers torch,compile,naive,quack,liger",
        260,
        [
            "softmax --dtype fp32 --columns 256 --peers compile",  # and the sweep
            "softmax --no-sweep --dtype fp32 --peers compile",
            "softmax --no-sweep --dtype bf16 --peers compile",
            "softmax --dtype fp32 --columns 256 --peers quack,liger",
            "softmax --no-sweep --peers quack,liger",
            "cross_entropy --peers compile",
            "cross_entropy --peers quack,liger",
        ],
        gib=7,
    ),
    bench(
        "linear_cross_entropy",
        "linear_cross_entropy --peers torch,compile,quack,liger,liger-cute,cce,cce-exact",
        200,
        [
            "linear_cross_entropy --peers compile,liger,cce,cce-exact",
            "linear_cross_entropy --peers quack",  # Liger's kernels in CuTe have no cache
        ],
        gib=40,
    ),
    Part(
        "linear_budget",
        f"{HERE}/budget.py --out {{table}}",
        "linear_budget.csv",
        90,
        (f"{HERE}/budget.py --repetitions 1 --out {os.devnull}",),
        gib=25,
    ),
    bench(
        "divergence",
        "divergence --columns 128256 --repetitions 5 --peers torch,compile,chunked,liger",
        90,
        ["divergence --columns 128256 --peers compile,liger"],
        gib=40,
    ),
)
NAMES = tuple(part.name for part in PARTS)
