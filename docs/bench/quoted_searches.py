"""The figures of decoding, language models and two heads.

The name of a function is the name of a quote.
"""

from __future__ import annotations

from quoted_rows import GIB, digits, figure, number, row, span, table

DECODE, DIVERGENCE, TEXT = "decode.csv", "divergence.csv", "text_search.csv"
BETAS = (0.0, 0.5, 1.0)
KINDS = ("peaky", "random")  # of logits
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


def _text(op: str, size: str, provider: str = "partita") -> str:
    time = number(TEXT, "median_ms", op=op, size=size, provider=provider)
    return f"{digits(time / 1e3, 2)} s" if time >= 1e3 else f"{digits(time, 2)} ms"


@figure
def ctc_decoder_cpu() -> str:
    names = {
        "partita": "`CTCDecoder`",
        "partita with unigrams_only": "with `unigrams_only` and no model",
        "partita without a model": "without a model",
        "flashlight-text": "flashlight-text 0.0.7 with a lexicon",
        "pyctcdecode": "pyctcdecode 0.5.0 with its cut-offs",
    }
    cases = {(31, name): said for name, said in names.items()}
    cases[1001, "partita without a model"] = "`CTCDecoder` without a model, 1,001 pieces of words"
    lines = [
        [said, *(_text("search", f"1 × 500 × {classes} {kind}", name) for kind in KINDS)]
        for (classes, name), said in cases.items()
    ]
    return table(["", *(f"{kind} logits" for kind in KINDS)], lines)


@figure
def ctc_decoder_chunk() -> str:
    first, last = (_text("chunk", "1 × 50 × 31", f"{which} minute") for which in ("first", "last"))
    return f"{first} for a chunk of 50 steps in its first minute, and {last} after an hour"


@figure
def ctc_decoder_tables() -> str:
    return _text("first call", "100000 words")


@figure
def ngram_files() -> str:
    read, mapped, kenlm = (
        _text("read", "5000011 n-grams", name) for name in ("from_arpa", "load", "kenlm")
    )
    return (
        f"reads 5 million n-grams of up to three words in {read} (kenlm {kenlm}),\n"
        f"and `load` maps what was saved of them in {mapped}"
    )


@figure
def ngram_advance() -> str:
    sizes = ("128 × 32", "128 × 1000", "16 × 100000")
    few, more, words = (_text("advance", size) for size in sizes)
    return (
        f"`advance` takes {few} for 128 states and 32 labels, {more} for 128 and 1,000,\n"
        f"and {words} for 16 states and 100,000 words"
    )


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
