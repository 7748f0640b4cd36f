"""The figures of transducers; the name of a function is the name of a quote."""

from __future__ import annotations

from quoted_rows import digits, figure, rows, table

TIMES, SEARCHES = "rnnt_gpu.csv", "h200/rnnt_search.csv"
SIZES = ("sequences", "steps", "labels", "classes")
COLUMNS = ("fp32_logits_ms", "torchaudio_ms", "bf16_logits_ms", "bf16_hidden_ms")


@figure
def rnnt_speed() -> str:
    lines = [
        [
            ", ".join(f"{int(each[size]):,}" for size in SIZES),
            *(digits(float(each[column]), 2) if each[column] else "" for column in COLUMNS),
            f"{int(each['bf16_hidden_mib']):,} MiB",
        ]
        for each in rows(TIMES)
    ]
    columns = ["fp32 logits", "torchaudio", "bf16 logits", "bf16 hidden states", "memory of these"]
    return table(["B, T, U, V", *columns], lines)


@figure
def rnnt_search_times() -> str:
    """The times differ by a fifth from call to call, so the least one stands beside the median."""
    names = {
        "rnnt_greedy": "greedy, RNN-T",
        "tdt_greedy": "greedy, TDT",
        "rnnt_beam": "beam of 4, RNN-T",
    }

    def cell(op: str, dtype: str) -> str:
        (found,) = rows(SEARCHES, op=op, dtype=dtype)
        return f"{digits(float(found['median_ms']))} ({digits(float(found['min_ms']))})"

    lines = [[name, cell(op, "fp32"), cell(op, "bf16")] for op, name in names.items()]
    return table(["search", "fp32", "bf16"], lines)
