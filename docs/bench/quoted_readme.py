"""The figures of README.md and of the CPU; the name of a function is the name of a quote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quoted_figures import CHAIN, CRF, CTC, LINEAR, ROWS
from quoted_rows import OURS, best_peer, digits, figure, number, ratio, row, rows, table


def compared(
    what: str, name: str, column: str = "median_ms", ours: str = OURS, **wanted: Any
) -> list[str]:
    """Return a line of `speed_table`: our time, and how many times as long others take."""
    own = number(name, column, provider=ours, **wanted)
    torch = [float(each[column]) for each in rows(name, provider="torch", **wanted) if each[column]]
    try:
        peer, time = best_peer(name, column, **wanted)
        comparison = f"{ratio(time / own)} ({peer})"
    except LookupError:
        comparison = ""
    # A time that is known with two digits is not given with three.
    known = min(3, len(row(name, provider=ours, **wanted)[column].replace(".", "").lstrip("0")))
    return [what, digits(own, known), ratio(torch[0] / own) if torch else "", comparison]


def _readme_lines() -> Iterator[list[str]]:
    logits = {"op": "cross_entropy", "part": "total", "dtype": "bf16"}
    yield compared("`cross_entropy`, 2,048 × 131,072 logits, bf16", ROWS, **logits, columns=131072)
    hidden = {"part": "total", "tokens": 8192, "vocabulary": 128256}
    yield compared(
        "`linear_cross_entropy`, 8,192 × 4,096 × 128,256, bf16",
        LINEAR,
        ours="partita-fast",
        **hidden,
    )
    stats = {"op": "token_stats", "part": "total"}
    yield compared("`token_stats`, 8,192 × 131,072, bf16", "token_stats.csv", **stats)
    ctc = {"op": "ctc", "part": "total", "steps": 1000}
    yield compared("`ctc_loss`, 1,000 steps × 64 × 32 classes, fp32", CTC, **ctc)
    yield compared("`ctc_crf_loss`, 2,000 steps × 64 × 4⁵ k-mers, fp32", CTC, **CRF)
    chain = {"op": "chain", "part": "total", "dtype": "fp32", "steps": 2000, "states": 1024}
    yield compared("`logz`, 2,000 steps × 64 × 1,024 states, fp32", CHAIN, **chain)
    step = "a training step of a small Llama, bf16 ¹"
    yield compared(step, "training_step.csv", "ms", ours="fuse")
    ops = {"ctc_loss": "steps × 16 × 32 classes", "cross_entropy": "× 32,000 logits"}
    sizes = {"ctc_loss": 500, "cross_entropy": 512}
    for op, size in ops.items():
        name = f"`{op}`, {sizes[op]} {size}, fp32, **CPU** ²"
        yield compared(name, "cpu.csv", "min_ms", op=op)


def speed_table(lines: Iterable[list[str]]) -> str:
    return table(["forward + backward", "ms", "PyTorch takes", "the best peer takes"], lines)


@figure
def readme_speed() -> str:
    return speed_table(_readme_lines())


@figure
def training_step() -> str:
    def said(provider: str) -> str:
        found = row("training_step.csv", provider=provider)
        return f"{digits(float(found['ms']), 3)} ms and {found['gib']} GiB"

    return (
        f"{said('torch')} as it comes,\n"
        f"{said('causal_lm_loss')} with `causal_lm_loss`,\n"
        f"{said('fuse')} with `fuse`,\n"
        f"{said('liger')} with Liger's loss"
    )


@figure
def cpu_machine() -> str:
    return f"one thread of an {row('cpu.csv', op='ctc_loss', provider=OURS)['machine']}"


@figure
def cpu_chain() -> str:
    ours, torch = (number("cpu.csv", "min_ms", op="logz", provider=x) for x in (OURS, "torch"))
    size = row("cpu.csv", op="logz", provider=OURS)["size"]
    return f"{digits(ours)} ms for {size}, where a loop over time in PyTorch takes {digits(torch)}"


@figure
def cpu_ctc() -> str:
    ours, torch = (number("cpu.csv", "min_ms", op="ctc_loss", provider=x) for x in (OURS, "torch"))
    size = row("cpu.csv", op="ctc_loss", provider=OURS)["size"]
    return f"{size} take {digits(ours)} ms (PyTorch {digits(torch)})"


@figure
def cpu_cross_entropy() -> str:
    wanted = {"op": "cross_entropy"}
    ours, torch = (number("cpu.csv", "min_ms", provider=x, **wanted) for x in (OURS, "torch"))
    return f"{digits(ours)} ms (PyTorch {digits(torch)})"
