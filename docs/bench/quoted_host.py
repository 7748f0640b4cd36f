"""The figures of the page about the host; the name of a function is the name of a quote."""

from __future__ import annotations

from quoted_rows import OURS, digits, figure, row, rows, span, table

HOST, FIRST_CALLS = "host.csv", "first_calls.csv"
CALLS = {  # op and variant: what the page calls it
    ("softmax", ""): "`softmax`",
    ("cross_entropy", ""): "`cross_entropy`",
    ("cross_entropy", "a new shape at every call"): "the same, a new shape at every call",
    ("token_stats", ""): "`token_stats`",
    ("linear_cross_entropy", ""): "`linear_cross_entropy`",
    ("ctc_loss", ""): "`ctc_loss`, lengths on the host",
    ("ctc_loss", "lengths on the device"): "`ctc_loss`, lengths on the GPU",
    ("ctc_loss", "a new shape at every call"): "`ctc_loss`, a new shape at every call",
    ("ctc_align", ""): "`ctc_align`",
    ("logz", ""): "`logz`",
    ("viterbi", ""): "`viterbi`",
    ("linear_chain", ""): "`linear_chain(...).logz`",
    ("ctc_crf_loss", ""): "`ctc_crf_loss`",
}


def _cells(op: str, variant: str, column: str) -> list[str]:
    """Return a number of Partita and of PyTorch, empty where there is none."""
    cells = []
    for provider in (OURS, "torch"):
        found = rows(HOST, op=op, variant=variant, provider=provider)
        value = found[0][column] if found else ""
        cells.append(digits(float(value)) if value and not value.isdigit() else value)
    return cells


@figure
def host_calls() -> str:
    lines = []
    for (op, variant), name in CALLS.items():
        kernels = [cell for cell in _cells(op, variant, "kernels") if cell]
        lines.append([name, *_cells(op, variant, "host_us"), ", ".join(kernels)])
    return table(["call", "Partita", "PyTorch", "kernels, Partita and PyTorch"], lines)


@figure
def host_machine() -> str:
    machine = row(HOST, op="machine")["provider"]
    torch, triton = (row(HOST, op="version", provider=name)["note"] for name in ("torch", "triton"))
    return f"{machine}, PyTorch {torch.partition('+')[0]}, Triton {triton}"


@figure
def host_first_calls() -> str:
    lines = [
        [
            f"`{each['op']}`",
            *(digits(float(each[c])) for c in ("empty_cache_s", "filled_cache_s")),
        ]
        for each in rows(FIRST_CALLS)
    ]
    return table(["op", "empty cache, s", "filled cache, s"], lines)


@figure
def host_first_call_span() -> str:
    return span(float(each["filled_cache_s"]) for each in rows(FIRST_CALLS))
