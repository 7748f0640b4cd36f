"""The figures of decoding and of two heads; the name of a function is the name of a quote."""

from __future__ import annotations

from quoted_rows import GIB, digits, figure, number, row, span, table

DECODE, DIVERGENCE = "decode.csv", "divergence.csv"
BETAS = (0.0, 0.5, 1.0)
HEADS = {"op": "linear_divergence", "part": "total", "tokens": 8192, "vocabulary": 128256}


def _decode(op: str, steps: int, provider: str = "partita", precision: int = 2) -> str:
    time = number(DECODE, "median_ms", op=op, steps=steps, part="inference", provider=provider)
    return f"{digits(time, precision)} ms"


@figure
def decode_beams() -> str:
    steps, words, symbols = (_decode("ctc_beam", steps) for steps in (1000, 500, 150))
    return (
        f"{steps}, over 500 steps × 32 × 32 classes {words}, and over 150 × 128 × 5,000 {symbols}"
    )


@figure
def decode_greedy() -> str:
    found = row(DECODE, op="ctc_greedy", steps=150, provider="partita")
    return f"{100 * float(found['fraction']):.0f} %"


@figure
def decode_crf() -> str:
    ours = _decode("ctc_crf_viterbi", 2000), _decode("ctc_crf_beam", 2000)
    koi = _decode("ctc_crf_beam", 2000, "koi")
    return f"{ours[0]} with `viterbi`, and {ours[1]} with `beam` and a width of 32 (koi {koi})"


def _heads(column: str, provider: str) -> list[float]:
    return [number(DIVERGENCE, column, provider=provider, beta=beta, **HEADS) for beta in BETAS]


@figure
def divergence_products() -> str:
    return f"{span(_heads('mean_ms', 'products'), 3)} ms"


@figure
def divergence_heads() -> str:
    providers = ("partita-fast", "partita-lean")
    gradients = _heads("extra_memory_bytes", "products")[0]  # beside what the loss needs
    memory = [_heads("extra_memory_bytes", name)[0] - gradients for name in providers]
    times = [_heads("mean_ms", name) for name in providers]
    others = [_heads("mean_ms", name) for name in ("compile", "liger")]
    header = ["`beta`", *(f"{each / GIB:.1f} GiB" for each in memory), "`torch.compile`", "Liger"]
    lines = [
        [f"{beta:g}", *(f"{digits(found[i])} ms" for found in (*times, *others))]
        for i, beta in enumerate(BETAS)
    ]
    return table(header, lines)
