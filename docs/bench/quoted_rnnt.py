"""The figures of transducers; the name of a function is the name of a quote."""

from __future__ import annotations

from quoted_rows import digits, figure, rows, table

TIMES = "rnnt_gpu.csv"
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
