"""The figures that README.md and the pages quote; the name of a function is the name of a quote."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quoted_rows import GIB, OURS, digits, error, figure, number, row, rows, span, table

LINEAR, CTC, CHAIN, ROWS = "linear_cross_entropy.csv", "ctc.csv", "chain.csv", "rows.csv"
HEADS = ((8192, 4096, 128256), (16384, 2048, 262144), (8192, 2048, 32768), (4096, 4096, 128256))
CRF = {"op": "ctc_crf", "part": "total"}


# Rows.


@figure
def cross_entropy_shares() -> str:
    header = ["classes"] + [
        f"{part}, {dtype}"
        for dtype in ("fp32", "bf16")
        for part in ("loss alone", "loss and gradient")
    ]
    lines = []
    for classes in (8192, 16384, 32768, 131072, 262144, 50257):
        shares = [
            number(
                ROWS,
                "fraction",
                op="cross_entropy",
                part=part,
                dtype=dtype,
                columns=classes,
                provider=OURS,
            )
            for dtype in ("fp32", "bf16")
            for part in ("inference", "total")
        ]
        lines.append([f"{classes:,}", *(f"{share:.3f}" for share in shares)])
    return table(header, lines)


@figure
def softmax_shares() -> str:
    lines = []
    for name in (OURS, "quack", "liger", "compile", "torch"):
        cells = []
        for dtype in ("fp32", "bf16"):
            wanted = {"op": "softmax", "part": "forward", "dtype": dtype, "provider": name}
            found = [float(each["fraction"]) for each in rows(ROWS, **wanted) if each["fraction"]]
            cells.append(f"{min(found):.2f} to {max(found):.2f}" if found else "")
        lines.append([name, *cells])
    return table(["softmax", "fp32", "bf16"], lines)


def _token_stats(part: str) -> str:
    wanted = {"op": "token_stats", "part": part}
    ours, compiled, torch = (
        digits(number("token_stats.csv", "median_ms", provider=name, **wanted), 2)
        for name in (OURS, "compile", "torch")
    )
    return f"{ours} ms (`torch.compile` of the formulas {compiled}, PyTorch {torch})"


@figure
def token_stats_fields() -> str:
    wanted = {"op": "token_stats", "part": "inference"}
    share = number("token_stats.csv", "fraction", provider=OURS, **wanted)
    return f"{_token_stats('inference')}, which is {100 * share:.0f} % of the read bandwidth"


@figure
def token_stats_total() -> str:
    return _token_stats("total")


# Losses from hidden states.


def _head(provider: str, size: tuple[int, int, int], part: str = "total") -> tuple[float, float]:
    """Return the mean time in units of the products, and the memory in GiB; NaN where untimed."""
    tokens, hidden, vocabulary = size
    wanted = {"part": part, "tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}
    units = number(LINEAR, "mean_ms", provider="products", **wanted)
    if not rows(LINEAR, provider=provider, **wanted):
        return math.nan, math.nan
    own = row(LINEAR, provider=provider, **wanted)
    return float(own["mean_ms"]) / units, float(own["extra_memory_bytes"] or "nan") / GIB


def _heads(provider: str, precision: int = 2) -> str:
    """Return the spans of times and of memory over all sizes."""
    found = [head for head in (_head(provider, size) for size in HEADS) if not math.isnan(head[0])]
    times = sorted(time for time, _ in found)
    memory = sorted(gib for _, gib in found)
    return (
        f"{times[0]:.{precision}f} to {times[-1]:.{precision}f} times in"
        f" {memory[0]:.1f} to {memory[-1]:.1f} GiB"
    )


@figure
def linear_fast() -> str:
    return _heads("partita-fast")


@figure
def linear_lean() -> str:
    return _heads("partita-lean")


@figure
def linear_liger() -> str:
    return _heads("liger", 1)


@figure
def linear_cce_exact() -> str:
    return _heads("cce-exact", 1)


@figure
def linear_cce() -> str:
    return _heads("cce", 1)


@figure
def linear_speed() -> str:
    header = ["tokens, H, C", "products, ms", "fast", "compile", "Liger"]
    header += ["cut-cross-entropy, exact", "lean"]
    lines = []
    for size in HEADS:
        products = number(
            LINEAR,
            "mean_ms",
            provider="products",
            part="total",
            tokens=size[0],
            hidden=size[1],
            vocabulary=size[2],
        )
        cells = [
            "not timed" if math.isnan(time) else f"{time:.2f} ×, {gib:.1f} GiB"
            for time, gib in (
                _head(name, size)
                for name in ("partita-fast", "compile", "liger", "cce-exact", "partita-lean")
            )
        ]
        lines.append([", ".join(f"{n:,}" for n in size), digits(products), *cells])
    return table(header, lines)


def _losses_alone(provider: str) -> str:
    *first, last = (f"{_head(provider, size, 'inference')[0]:.2f}" for size in HEADS)
    return f"{', '.join(first)} and {last}"


@figure
def linear_loss_alone() -> str:
    return _losses_alone("partita-fast")


@figure
def linear_loss_alone_torch() -> str:
    return _losses_alone("torch")


@figure
def linear_loss_alone_compile() -> str:
    return _losses_alone("compile")


# Chains.


def _chain(provider: str, op: str, part: str, size: dict[str, int]) -> str:
    found = [
        each
        for each in rows(CHAIN, op=op, part=part, provider=provider, dtype="fp32", **size)
        if each["median_ms"]
    ]
    return f"{float(found[0]['median_ms']):.2f}" if found else "–"


@figure
def chain_speed() -> str:
    header = ["steps × chains × states", "log Z and gradient", "of the bound", "ont-koi"]
    header += ["seqdist", "log Z alone", "Viterbi"]
    lines = []
    for each in rows(CHAIN, op="chain", part="total", provider=OURS, dtype="fp32"):
        size = {name: int(each[name]) for name in ("steps", "chains", "states", "slots")}
        name = f"{size['steps']:,} × {size['chains']} × {size['states']:,}"
        name += ", 3 edges (CTC-shaped)" if size["slots"] == 3 else ""
        share = f"{100 * float(each['fraction']):.0f} %"
        gradients = [_chain(who, "chain", "total", size) for who in (OURS, "koi", "seqdist")]
        alone = [_chain(OURS, op, "inference", size) for op in ("chain", "viterbi")]
        lines.append([name, gradients[0], share, *gradients[1:], *alone])
    return table(header, lines)


def _chain_share(states: int) -> str:
    wanted = {"op": "chain", "part": "total", "dtype": "fp32", "provider": OURS}
    return f"{100 * number(CHAIN, 'fraction', steps=800, states=states, **wanted):.0f} %"


@figure
def chain_memory() -> str:
    """Return the memory beyond the scores, in units of them."""
    size = {"steps": 2000, "chains": 64, "states": 1024, "slots": 5}
    scores = 4 * 2000 * 64 * 1024 * 5
    wanted = {"op": "chain", "part": "total", "dtype": "fp32", **size}
    ours, koi, seqdist = (
        digits(number(CHAIN, "extra_memory_bytes", provider=name, **wanted) / scores, 2)
        for name in (OURS, "koi", "seqdist")
    )
    return f"{ours} times the scores, ont-koi {koi} and seqdist {seqdist}"


@figure
def chain_share_64() -> str:
    return _chain_share(64)


@figure
def chain_share_1024() -> str:
    return _chain_share(1024)


@figure
def chain_exactness() -> str:
    chains = ("k-mers, 64 states", "sticky HMM, 8 states", "CTC, up to 200 labels")
    header = ["steps"] + [
        f"{name.partition(',')[0]}, {who}" for name in chains for who in ("usual", "Partita")
    ]
    lines = []
    for steps in (100, 1000, 2000, 20000, 100000):
        cells = []
        for name in chains:
            for who in ("plain fp32", OURS):
                found = row("chain_exactness.csv", chain=name, steps=steps, provider=who)
                cells.append(error(float(found["marginal_error"]), 2))
        lines.append([f"{steps:,}", *cells])
    return table(header, lines)


@figure
def row_errors() -> str:
    names = {OURS: "Partita", "torch": "PyTorch", "compile": "compiled", "quack": "quack"}
    names["liger"] = "Liger"
    cases = [(8192, "fp32"), (50257, "fp32"), (262144, "fp32"), (8192, "bf16"), (131072, "bf16")]
    lines = []
    for classes, dtype in cases:
        wanted = {"op": "cross_entropy", "part": "total", "dtype": dtype, "columns": classes}
        found = [rows(ROWS, provider=name, **wanted) for name in names]
        errors = [digits(float(each[0]["error_ulp"])) if each else "not timed" for each in found]
        lines.append([f"{classes:,}, {dtype}", *errors])
    return table(["classes", *names.values()], lines)


# CTC and CTC-CRF.


def _ctc_rows() -> Iterator[tuple[dict[str, str], dict[str, str], dict[str, str]]]:
    """Yield the rows of Partita and PyTorch, and the size of each case."""
    for own in rows(CTC, op="ctc", part="total", provider=OURS):
        names = ("steps", "sequences", "classes", "shortest", "longest")
        size = {name: own[name] for name in names}
        found = rows(CTC, op="ctc", provider="torch", **size)
        total = [each for each in found if each["part"] in ("total", "")]
        yield own, total[0], size


@figure
def ctc_speed() -> str:
    lines = []
    for own, torch, size in _ctc_rows():
        steps, batch, classes, shortest, longest = (f"{int(n):,}" for n in size.values())
        labels = shortest if shortest == longest else f"{shortest}–{longest}"
        ours = float(own["median_ms"])
        timed = torch["median_ms"] and float(torch["median_ms"])
        lines.append(
            [
                f"{steps}, {batch}, {classes}, {labels}",
                digits(ours),
                digits(timed) if timed else "wrong, so not timed",
                digits(timed / ours, 2) if timed else "",
                error(float(own["error"])),
                error(float(torch["error"])),
            ]
        )
    return table(["T, N, C, labels", "ms", "PyTorch", "faster", "error", "PyTorch's"], lines)


@figure
def ctc_share() -> str:
    share = number(CTC, "fraction", op="ctc", part="total", provider=OURS, classes=5000)
    return f"{100 * share:.0f} %"


@figure
def ctc_seqdist_longer() -> str:
    return span(
        float(peer["median_ms"]) / float(own["median_ms"])
        for own, _, size in _ctc_rows()
        for peer in rows(CTC, op="ctc", part="total", provider="seqdist", **size)
        if peer["median_ms"]
    )


@figure
def ctc_torch_errors() -> str:
    found = {int(size["steps"]): float(torch["error"]) for _, torch, size in _ctc_rows()}
    return (
        ", ".join(f"{error(found[steps])} at {steps:,}" for steps in (64, 4000, 30000)) + " steps"
    )


@figure
def ctc_greatest_error() -> str:
    return error(max(float(own["error"]) for own, _, _ in _ctc_rows()), 2)


@figure
def ctc_align_cost() -> str:
    found = row(CTC, op="ctc_align", part="inference", provider=OURS)
    memory = float(found["extra_memory_bytes"]) / 1e9
    return f"{digits(float(found['median_ms']), 2)} ms and {memory:.1f} GB"


def _crf(provider: str) -> str:
    """Return the time, and the memory in units of the fp32 scores: T × N × 4⁵ states × 5 edges."""
    found = row(CTC, provider=provider, **CRF)
    scores = (
        4
        * int(found["steps"])
        * int(found["sequences"])
        * int(found["states"])
        * int(found["slots"])
    )
    memory = float(found["extra_memory_bytes"]) / scores
    time = digits(float(found["median_ms"]), 2 if provider == OURS else 3)
    return f"{time} ms and {memory:.1f} times"


@figure
def ctc_crf_ours() -> str:
    return _crf(OURS)


@figure
def ctc_crf_koi() -> str:
    return _crf("koi")


# Several GPUs.


def _parallel(provider: str, op: str, gpus: int) -> str:
    found = rows("parallel.csv", provider=provider, op=op, gpus=gpus)
    if not found:
        return ""
    ms, gib = float(found[0]["median_ms"]), float(found[0]["extra_gib"])
    return f"{digits(ms, 2 if ms < 10 else 3)} ms, {gib:.1f} GiB"


@figure
def parallel_speed() -> str:
    logits = "cross_entropy"
    names = {
        OURS: "`parallel.cross_entropy`",
        "loss_parallel": "PyTorch's `loss_parallel()`",
        "megatron": "Megatron's method in plain PyTorch",
        "one shard": "one shard alone, without any exchange",
    }
    lines = [
        [said, *(_parallel(name, logits, gpus) for gpus in (1, 2, 4))]
        for name, said in names.items()
    ]
    op = "linear_cross_entropy"
    one = number("parallel.csv", "median_ms", op=op, gpus=1)
    cells = [_parallel(OURS, op, 1)]
    for gpus in (2, 4):
        scaling = one / gpus / number("parallel.csv", "median_ms", op=op, gpus=gpus)
        cells.append(f"{_parallel(OURS, op, gpus)}: {scaling:.2f} of linear scaling")
    lines.append(["`parallel.linear_cross_entropy`", *cells])
    return table(["", "1 GPU", "2 GPUs", "4 GPUs"], lines)


@figure
def parallel_exchange() -> str:
    def more(gpus: int) -> str:
        ours, alone = (
            number("parallel.csv", "median_ms", op="cross_entropy", gpus=gpus, provider=name)
            for name in (OURS, "one shard")
        )
        return f"{100 * (ours / alone - 1):.0f} %"

    return f"{more(2)} on two GPUs and {more(4)} on four"
