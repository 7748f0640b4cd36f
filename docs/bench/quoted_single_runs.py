"""Figures of single runs; no script of this folder measures them again.

The name of a function is the name of a quote.
"""

from __future__ import annotations

from quoted_rows import digits, figure, row, rows, table

TABLE = "single_runs.csv"


def _all(op: str, machine: str, size: str, variant: str) -> str:
    """Return the times of one case, as they were noted."""
    found = rows(TABLE, op=op, machine=machine, size=size, variant=variant)
    return ", ".join(each["ms"] for each in found)


def _each(op: str, machine: str, size: str, *variants: str) -> list[str]:
    """Return the times of some variants of a case."""
    return [_all(op, machine, size, variant) for variant in variants]


@figure
def divergence_rows() -> str:
    bound = float(_all("divergence", "H100", "beta 0", "copy"))
    lines = []
    for beta in ("0", "0.5", "1"):
        size = f"beta {beta}"
        time, plain = _each("divergence", "H100", size, "one pass", "without the hints")
        share = digits(bound / float(time), 2)
        lines.append([beta, f"{time} ms", share, plain and f"{plain} ms"])
    return table(["`beta`", "time", "share of the bandwidth", "without the hints"], lines)


@figure
def divergence_rows_h200() -> str:
    plain, passes = (
        [_all("divergence", "H200", f"beta {beta}", variant) for beta in ("0", "0.5", "1")]
        for variant in ("without the hints", "two passes")
    )
    return (
        f"{plain[0]}, {plain[1]} and {plain[2]} ms,\n"
        f"and two passes take {passes[0]}, {passes[1]} and {passes[2]} ms"
    )


@figure
def linear_batch_invariant() -> str:
    case, variants = ("linear_cross_entropy", "H100"), ("usual", "batch-invariant")
    lines = [
        [f"{tokens:,}", *_each(*case, f"{tokens} tokens", *variants)]
        for tokens in (1, 1024, 2048, 4096, 8192)
    ]
    return table(["tokens", "usual", "in the mode"], lines)


@figure
def linear_packed() -> str:
    shares = ("0", "50", "90")
    lines = [
        [
            variant,
            *(
                _all("linear_cross_entropy", "H200", f"{share} % ignored", variant)
                for share in shares
            ),
        ]
        for variant in ("by default", "packed")
    ]
    return table(["", *(f"{share} %" for share in shares)], lines)


@figure
def linear_low_rank() -> str:
    variants = ("two products", "low rank", "without low rank")
    bare, ours, without = _each("linear_cross_entropy", "H200", "rank 16", *variants)
    ratio = digits(float(ours) / float(bare))
    return f"{ours} ms,\n  {ratio} × two bare products ({bare}); without low rank {without}"


@figure
def rnnt_batch_invariant() -> str:
    (usual, mode), (few, few_mode) = (
        _each("linear_rnnt_loss", "H200", size, "usual", "batch-invariant")
        for size in ("32 x 400 x 100", "8 x 200 x 40")
    )
    return (
        f"{mode} ms instead of {usual}, and of 8 × 200 × 40, which otherwise keep their logits,\n"
        f"{few_mode} instead of {few}"
    )


@figure
def distillation_times() -> str:
    size = "8192 x 4096 x 128256"
    divergence = _all("linear_divergence", "H200", size, "kl")
    two, four = _each("linear_distillation_loss", "H200", size, "hard kl", "hard kl jsd tv")
    return (
        f"{divergence} ms on an H200 for `linear_divergence`, {two} ms for `hard` and `kl`,\n"
        f"and {four} ms for `hard`, `kl`, `jsd` and `tv`"
    )


@figure
def trl_steps() -> str:
    lines = []
    for size in ("SFT", "SFT with labels for half of the tokens", "DPO"):
        cells = []
        for variant in ("patched", "TRL's own"):
            found = rows(TABLE, op="trl", size=size, variant=variant)
            times = " to ".join(dict.fromkeys(each["ms"] for each in found))
            cells.append(f"{times} ms, {found[0]['gib']} GiB")
        lines.append([size, *cells])
    return table(["trainer", "with `patch()`", "TRL's own head"], lines)


@figure
def decode_crf_h200() -> str:
    def said(variant: str) -> str:
        found = row(TABLE, op="ctc_crf_decode", variant=variant)
        return f"{found['ms']} ms and {found['gib']} GiB"

    half = row(TABLE, op="ctc_crf_decode", variant="viterbi fp16")["ms"]
    return (
        f"{said('viterbi')} ({half} ms from fp16 scores), {said('beam')}, and\n"
        f"`posterior` takes {said('posterior')}"
    )


@figure
def ctc_decoder_gpu() -> str:
    names = {
        "kernels": "the kernels",
        "whole call": "a whole call, whose host makes texts",
        "kernels with hotwords and boost": "the kernels with `hotwords` and `boost`",
        "whole call with hotwords and boost": "a whole call with both",
    }
    sizes = [f"64 x 500 x 31 {kind}" for kind in ("peaky", "random")]
    lines = [
        [said, *(_all("ctc_decoder", "H200", size, name) for size in sizes)]
        for name, said in names.items()
    ]
    return table(["", "peaky logits", "random logits"], lines)


@figure
def support_matrix() -> str:
    variant = "gradient of the matrix without cuts"
    return f"{row(TABLE, op='linear_support_stats', variant=variant)['ms']} ms"


@figure
def support_step() -> str:
    return f"{row(TABLE, op='linear_support_stats', variant='step')['ms']} ms"


@figure
def hmm_iterations() -> str:
    """Write the times of an iteration beside those of peers; a peer may have only one size."""
    lines = []
    for size, said in (("1 x 100000", "1 × 100,000"), ("100 x 1000", "100 × 1,000")):
        times = _each("hmm", "H200", size, "partita", "dynamax", "pomegranate")
        lines.append([said, *(f"{each} ms" if each else "–" for each in times)])
    return table(["sequences × steps", "`partita.hmm`", "dynamax", "pomegranate"], lines)


@figure
def hmm_fits() -> str:
    whole, many, one = _each(
        "hmm", "H200", "1 x 100000", "whole fit of one iteration", "64 restarts", "one start"
    )
    gib = row(TABLE, op="hmm", variant="64 restarts")["gib"]
    return (
        f"checks parameters, takes {whole} ms. From drawn starting values, an iteration takes\n"
        f"{many} ms for 64 restarts and {one} ms for one, and the restarts {gib} GiB of memory"
    )


@figure
def rnnt_search_round() -> str:
    case = ("rnnt_search", "H200", "greedy 64 x 500")
    parts = ("fp32 round", "fp32 head", "fp32 LSTM", "fp32 search")
    times = _each(*case, *parts, "bf16 head of 1025", "bf16 head of 1030")
    each, head, lstm, search, odd, even = (digits(1e3 * float(time), 2) for time in times)
    return (
        f"{each} microseconds on\n"
        f"the GPU: {head} for the head's matrix product, {lstm} for the LSTM and {search} for the"
        " search's own two kernels. In bf16\n"
        f"the product takes {odd} with the 1,025 outputs of the RNN-T and {even} with the 1,030 of"
        " the TDT"
    )
