"""The figures of the run on an H200; the name of a function is the name of a quote."""

from __future__ import annotations

from collections.abc import Iterator

from quoted_figures import CRF
from quoted_readme import compared, speed_table
from quoted_rows import OURS, digits, figure, number, row

ROWS, LINEAR, CTC = "h200/rows.csv", "h200/linear_cross_entropy.csv", "h200/ctc.csv"
CHAIN, RNNT = "h200/chain.csv", "h200/rnnt.csv"


def _lines() -> Iterator[list[str]]:
    for columns in (32768, 131072):
        size = f"{2**28 // columns:,} × {columns:,}"
        wanted = {"part": "total", "dtype": "bf16", "columns": columns}
        yield compared(f"`softmax`, {size}, bf16", ROWS, op="softmax", **wanted)
        yield compared(f"`cross_entropy`, {size}, bf16", ROWS, op="cross_entropy", **wanted)
    for tokens, hidden, classes in ((8192, 4096, 128256), (16384, 2048, 262144)):
        yield compared(
            f"`linear_cross_entropy`, {tokens:,} × {hidden:,} × {classes:,}, bf16",
            LINEAR,
            ours="partita-fast",
            part="total",
            tokens=tokens,
            vocabulary=classes,
        )
    ctc = {"op": "ctc", "part": "total"}
    yield compared("`ctc_loss`, 1,000 steps × 64 × 32 classes, fp32", CTC, steps=1000, **ctc)
    yield compared("`ctc_loss`, 150 steps × 128 × 5,000 classes, fp32", CTC, steps=150, **ctc)
    yield compared("`ctc_crf_loss`, 2,000 steps × 64 × 4⁵ k-mers, fp32", CTC, **CRF)
    chain = {"op": "chain", "part": "total", "dtype": "fp32", "steps": 2000, "states": 1024}
    yield compared("`logz`, 2,000 steps × 64 × 1,024 states, fp32", CHAIN, **chain)
    rnnt = {"part": "total", "sequences": 32}
    size = "32 × 200 steps × 100 × 1,025"
    yield compared(f"`rnnt_loss`, {size}, fp32", RNNT, op="rnnt", dtype="fp32", **rnnt)
    yield compared(f"`linear_rnnt_loss`, {size}, bf16", RNNT, op="linear_rnnt", **rnnt)


@figure
def h200_machine() -> str:
    machine = row(ROWS, op="machine", part="copy")
    copy = number(ROWS, "gb_per_s", op="machine", part="copy")
    torch = row(ROWS, op="version", provider="torch")["note"]
    return f"{machine['provider']}, whose copies run at {copy / 1e3:.2f} TB/s, PyTorch {torch}"


@figure
def h200_speed() -> str:
    return speed_table(_lines())


@figure
def h200_ties() -> str:
    wanted = {"op": "viterbi", "provider": OURS, "steps": 800, "states": 1024}
    bf16, fp32 = (number(CHAIN, "median_ms", dtype=dtype, **wanted) for dtype in ("bf16", "fp32"))
    return f"{digits(bf16)} ms in bf16 and {digits(fp32)} ms in fp32"
