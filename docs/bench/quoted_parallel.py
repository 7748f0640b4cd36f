"""The estimates of the page about several GPUs; the name of a function is the name of a quote."""

from __future__ import annotations

import scaling
from quoted_rows import digits, figure, table


@figure
def parallel_work() -> str:
    return f"{digits(scaling.PRODUCTS_MS)} ms"


@figure
def parallel_passes() -> str:
    return f"{digits(scaling.PASSES_MS, 2)} ms"


@figure
def parallel_ring() -> str:
    return f"{digits(2 * scaling.EXCHANGED_BYTES / 1e9, 2)} GB"


def _line(ranks: tuple[int, int], how: str, overlapped: str, hidden: str = "") -> list[str]:
    expected = digits(scaling.loss_ms(*ranks), 1)
    if ranks[1] > 1:
        matrix = digits(scaling.matrix_ms(*ranks), 2)
        expected += f", and {matrix} for the matrix's gradient over the machines{hidden}"
    work, exchange = scaling.work_ms(*ranks), scaling.exchange_ms(*ranks)
    gpus = str(ranks[0] * ranks[1])
    return [gpus, how, digits(work, 2), digits(exchange, 2), overlapped, expected]


@figure
def parallel_estimates() -> str:
    header = [
        "GPUs",
        "how",
        "products and passes, ms",
        "exchange, ms",
        "overlapped",
        "expected, ms",
    ]
    machines = "vocabulary over the 8 of a machine, tokens over {} machines"
    hidden = ", which other layers' backward passes hide"
    lines = [
        _line((8, 1), "vocabulary over 8", "yes"),
        _line((64, 1), "vocabulary over 64", "no"),
        _line((8, 8), machines.format(8), "yes"),
        _line((8, 64), machines.format(64), "in part", hidden),
    ]
    return table(header, lines)
