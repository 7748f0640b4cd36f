"""The benchmark at tiny sizes: what it refuses, counts and writes.

No test depends on a measured time.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bench import (
    CPU,
    SETTINGS,
    bench,
    read,
    row_of,
    run,
    run_as,
    settings_with,
    texts_of,
    with_gradient_times,
)
from helpers.rows import devices
from torch import Tensor

from partita.bench import chain, cli, providers, rows, runner
from partita.bench.case import Case, Provider
from partita.bench.measure import Timing
from partita.bench.providers import PARTITA, TORCH

CHAINS = ("chain", "linear_chain", "semi_markov")
CTC, RNNT = ("ctc", "ctc_crf", "ctc_align"), ("rnnt", "tdt", "linear_rnnt")
LINEAR = ("linear_cross_entropy", "linear_divergence", "linear_distillation_loss")
TINY = "--elements 2048 --columns 16,33 --repetitions 2"
SOFTMAX = f"softmax {TINY} --no-sweep --device cpu"
PICTURED = ("softmax", "cross_entropy", "chain", "ctc")  # the ops of one run with a picture
NAIVE = next(peer for peer in providers.PEERS if peer.name == "naive")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the peers by PyTorch and the given ones."""
    return lambda *extra: monkeypatch.setattr(providers, "PEERS", (TORCH, *extra))


PARTS = ("inference", "forward", "backward", "total")
FROM_HIDDEN = {*product(PARTS, ("bf16",), ("partita-fast", "partita-lean", "products", "torch"))}
OF_BOTH = ("fp32", "bf16"), ("partita", "torch")  # dtypes and providers
# What the table has of some cases, (part, dtype, provider) each.
MEASURED: dict[str, set[tuple[str, ...]]] = {
    "softmax": {*product(PARTS[1:], *OF_BOTH)},
    "log_softmax": {*product(PARTS[:1], *OF_BOTH)},
    "cross_entropy": {
        *product(PARTS, *OF_BOTH),
        *product(("total",), ("fp32", "bf16"), ("partita-inplace",)),
    },
    **{
        name: {*product(("inference", "backward", "total"), *OF_BOTH)}
        for name in ("token_stats", "logprobs")
    },
    **{name: {*product(PARTS, *OF_BOTH)} for name in (*CHAINS, *CTC[:2], *RNNT[:2])},
    **{name: {*product(PARTS[:1], *OF_BOTH)} for name in ("viterbi", "linear_viterbi")},
    **{
        name: {*product(PARTS[:1], ("fp32", "bf16"), ("partita",))}
        for name in ("ctc_align", "semi_markov_viterbi", "semi_markov_nbest")
    },
    "hmm_fit": {("inference", "fp32", "partita")},
    "ctc_crf_stitch": {("inference", "fp32", "partita")},
    "ngram_advance": {("inference", "fp64", "partita")},
}


def check_rows(machine: dict[str, float], measured: list[dict[str, str]], device: str) -> None:
    """Check what each line of a table says of its time, its error and its share of a bandwidth."""
    assert measured
    for row in measured:
        assert row["note"] == ""
        assert 0 < float(row["min_ms"]) <= float(row["median_ms"]) <= float(row["max_ms"])
        # Elsewhere gradients are summed in half types.
        exact = row["provider"] == "partita" or row["dtype"] == "fp32"
        # Losses from hidden states and of pairs have tests of their own.
        if not row["op"].startswith(("linear_", "contrastive_")):
            names = ("error_ulp", "error_nats", "error")
            error = next(float(row[name]) for name in names if row.get(name))
            assert error < ((1e-4 if exact else 1e-2) if row.get("steps") else 64)
        if row.get("fraction"):
            assert float(row["gb_per_s"]) == pytest.approx(
                int(row["bytes"]) / float(row["median_ms"]) / 1e6, rel=1e-4
            )
            assert float(row["fraction"]) == pytest.approx(
                float(row["gb_per_s"]) / machine[row["limit"]], rel=1e-3, abs=1e-4
            )
        measured_part = row["part"] == "total" or row["op"] == "ctc_align"
        of_heads = (
            "contrastive_loss",
            "linear_support_stats",
            "linear_truncated_stats",
            "linear_cross_entropy_lora",
        )
        of_rows = ("cross_entropy", "divergence", *of_heads)
        assert bool(row.get("extra_memory_bytes")) == (
            device == "cuda"
            and row["op"] in (*LINEAR, *of_rows, *CHAINS, *CTC, *RNNT)
            and measured_part
        )


def table(ops: str, device: str, out: Path) -> list[dict[str, str]]:
    """Return the lines of a table, which have been checked."""
    command = f"{ops} {TINY} --quick --peers torch,naive --device {device}"
    assert bench(command, "--out", str(out)) == 0
    machine, measured = read(out / "bench.csv")
    check_rows(machine, measured, device)
    found: dict[str, set[Any]] = defaultdict(set)
    for row in measured:
        found[row["op"]].add((row["part"], row["dtype"], row["provider"]))
    assert all(MEASURED.get(name, set()) <= rows for name, rows in found.items())
    assert all(found[name] == FROM_HIDDEN for name in LINEAR if name in found)
    return measured


@devices
@pytest.mark.parametrize("op", [op for op in cli.OPS if op not in PICTURED])
def test_the_table_of_an_op(
    op: str, device: str, tmp_path: Path, peers: Callable[..., None]
) -> None:
    peers(NAIVE)
    table(op, device, tmp_path)


@devices
def test_table_csv_and_picture_of_some_ops(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], peers: Callable[..., None]
) -> None:
    peers(NAIVE)
    out = tmp_path / "new folder"
    measured = table(" ".join(PICTURED), device, out)
    replayed = {row["provider"] for row in measured if row["part"] == "replay"}
    assert replayed == {"partita", "torch", "naive"}
    sizes = {
        tuple(row[name] for name in chain.ChainCase.sizes)
        for row in measured
        if row["op"] in ("chain", "viterbi")
    }
    assert sizes == {("25", "1", "16", "5"), ("12", "1", "33", "5")}
    texts = texts_of(out / "bench.svg")
    assert {"partita", "torch", "naive", "copy", "columns", "25 × 1 ×", "12 × 1 ×"} <= texts
    for dtype in ("fp32", "bf16"):
        for caption in (
            "log Z and its gradient, {} scores",
            "CTC loss and its gradient, {} logits",
            "CTC-CRF loss and its gradient, {} scores",
        ):
            assert any(text and text.startswith(caption.format(dtype)) for text in texts)
    printed = capsys.readouterr().out
    assert "mean" not in printed
    for title in ("softmax fp32", "softmax sweep fp32", "viterbi bf16"):
        assert f"\n{title}\n" in printed
    assert ("cross_entropy bf16, total: percent of copy bandwidth" in printed) == (device == "cuda")
    assert ("%" in printed) == (device == "cuda")
    shares = "\nsteps × chains × states × slots  partita  torch\n"
    assert (shares in printed) == (device == "cuda")
    assert ("No GPU" in printed) == (not torch.cuda.is_available())


def test_all_ops_are_measured_by_default(
    tmp_path: Path, peers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers(NAIVE)
    names = {case.op for cases in cli.OPS.values() for case in cases(SETTINGS)}
    assert names >= {*MEASURED, *LINEAR}
    monkeypatch.setattr(cli, "OPS", {op: cli.OPS[op] for op in ("logprobs", "ngram")})
    measured = table("", "cpu", tmp_path)
    assert {row["op"] for row in measured} == {"logprobs", "ngram_score", "ngram_advance"}


def test_an_absent_peer_gets_one_line(
    capsys: pytest.CaptureFixture[str], peers: Callable[..., None]
) -> None:
    peers(
        Provider(
            "absent",
            {"softmax": lambda: torch.softmax},
            packages=("torch", "no_such_package"),
            install="pip install no-such-package",
        )
    )
    assert bench(f"{SOFTMAX} --peers absent") == 0
    assert "absent: not installed (pip install no-such-package)\n" in capsys.readouterr().out
    assert bench(f"cross_entropy {TINY} --device cpu --peers absent") == 0
    assert "absent" not in capsys.readouterr().out  # it has no such op


def test_ours_and_the_yardstick_stand_before_the_chosen_peers() -> None:
    always = ["partita", "partita-inplace", "partita-fast", "partita-lean", "products"]
    chosen = [provider.name for provider in providers.choose(["quack", "torch"])]
    assert chosen == [*always, "quack", "torch"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", cli.OPS)
def test_sizes(op: str, device: str) -> None:
    """Quick runs are smaller, widths are those that are asked for, and logits as many as fit."""

    def cases(**changes: Any) -> list[Any]:
        settings = settings_with(dtypes=(), device=torch.device(device), **changes)
        found: list[Any] = list(cli.OPS[op](settings))
        assert len(set(found)) == len(found)
        return found

    def logits(cases: list[Any]) -> int:
        return sum(math.prod(case.shape) for case in cases)

    full, quick = cases(quick=False), cases()
    assert {(case.op, case.dtype) for case in quick} == {(case.op, case.dtype) for case in full}
    assert logits(quick) < logits(full) or quick == full
    for case in cases(columns=(1, 50)):
        if case.width:
            assert getattr(case, case.width) in (case.least_width, 50)
        elif isinstance(case, rows.RowsCase) and not isinstance(case, rows.Sweep):
            assert case.columns in (1, 50) and case.rows == case.shape[0]
    for limit in (5000, 1):
        for case in cases(elements=limit):
            sizes = case.shrinks or {"rows": 1}
            is_least = all(getattr(case, name) <= least for name, least in sizes.items())
            assert math.prod(case.shape) <= 1.1 * limit or is_least


def _wrong_path(scores: Tensor, *others: Tensor) -> Tensor:
    edges = chain.loop_viterbi(scores, *others)
    edges[len(edges) // 2] = 0
    return edges


BROKEN = {
    "softmax": lambda x: 1.1 * torch.softmax(x, -1),
    "log_softmax": lambda x: torch.cat([torch.log_softmax(x, -1)[:-1], x[-1:]]),
    "cross_entropy": with_gradient_times(0.5, torch.nn.functional.cross_entropy),
    "token_stats": lambda x, target: (*rows.token_stats(x, target)[:3], x.argmin(-1)),
    "chain": lambda *inputs: 1.1 * chain.loop_logz(*inputs),
    "viterbi": _wrong_path,
}


@pytest.mark.parametrize("op", ["softmax", "cross_entropy", "token_stats", "chain"])
def test_the_wrong_are_not_timed(op: str) -> None:
    broken = Provider(
        "wrong", {name: lambda function=function: function for name, function in BROKEN.items()}
    )
    found = run(cli.OPS[op](SETTINGS), broken)
    assert found and all(row.timing is None for row in found)
    assert all(row.note.startswith("wrong: ") for row in found)


def test_unwritten_memory_is_wrong() -> None:
    def unwritten(x: Tensor) -> Tensor:
        result = torch.full_like(x, torch.nan)
        result[1:] = torch.softmax(x, -1)[1:]
        return result

    (row,) = run_as("unwritten", rows.Softmax("softmax", torch.float32, 4, 8), unwritten)
    assert row.timing is None and math.isinf(row.error)


def test_ours_must_be_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = dataclasses.replace(PARTITA, ops={"softmax": lambda: BROKEN["softmax"]})
    monkeypatch.setattr(providers, "OURS", (broken,))
    path = tmp_path / "times.csv"
    assert bench(f"{SOFTMAX} --dtype fp32 --only-ours", "--csv", str(path)) == 1
    assert capsys.readouterr().err.count("partita wrong: ") == 2
    assert [row["note"][:6] for row in read(path)[1]] == ["wrong:"] * 2


def test_a_peer_may_refuse(peers: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def narrow(x: Tensor) -> Tensor:
        if x.shape[1] > 16:
            raise ValueError("too wide\nby far")
        return torch.softmax(x, -1)

    peers(
        Provider("narrow", {"softmax": lambda: narrow}),
        Provider("broken", {"softmax": lambda: __import__("no_such_module")}),
    )
    assert bench(f"{SOFTMAX} --dtype fp32 --peers narrow,broken") == 0
    printed = capsys.readouterr().out
    assert printed.count("refuses: ValueError: too wide\n") == 1
    assert printed.count("refuses: ModuleNotFoundError: No module named 'no_such_module'\n") == 2


def test_an_interrupted_run_writes_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def times(self: Case, *args: object) -> dict[str, Timing]:
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"inference": Timing.of([1.0])}

    monkeypatch.setattr(rows.LogSoftmax, "times", times)
    path = tmp_path / "times.csv"
    assert bench(f"{SOFTMAX} --dtype fp32", "--peers", "", "--csv", str(path)) == 130
    assert {row["columns"] for row in read(path)[1]} == {"16", "33"}


def test_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: object) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(runner.DeviceLost, match="ValueError: told"):
        runner.require_device(torch.device("cuda"), ValueError("told"))


def test_a_picture_needs_matplotlib(
    no_matplotlib: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench("softmax", "--svg", str(tmp_path / "x.svg")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bytes_that_must_be_moved(dtype: torch.dtype) -> None:
    size = 6 * 10 * dtype.itemsize
    expected = {
        rows.Softmax("softmax", dtype, 6, 10): {
            "forward": (2, "copy"),
            "backward": (3, "copy"),
            "total": (5, "copy"),
        },
        rows.LogSoftmax("log_softmax", dtype, 6, 10): {"inference": (2, "copy")},
        rows.Sweep("softmax", dtype, 6, 10): {"replay": (2, "copy")},
        rows.CrossEntropy("cross_entropy", dtype, 6, 10): {
            "inference": (1, "read"),
            "total": (2, "copy"),
        },
        rows.TokenStats("token_stats", dtype, 6, 10): {
            "inference": (1, "read"),
            "backward": (2, "copy"),
            "total": (3, "copy"),
        },
        chain.LogZ("chain", dtype, 2, 3, 2, chain.kmers): {
            "inference": (1, "read"),
            "total": (3, "copy"),
        },
        chain.Viterbi("viterbi", dtype, 5, 2, 2, chain.alignment): {"inference": (1, "read")},
    }
    for case, moves in expected.items():
        assert {part: (m.bytes, m.limit) for part, m in case.moves.items()} == {
            part: (n * size, limit) for part, (n, limit) in moves.items()
        }


def test_shares_of_the_bandwidth() -> None:
    case = rows.CrossEntropy("cross_entropy", torch.float32, 1000, 1000)  # 4 MB
    slow = Timing.of([8.0, 4.0, 6.0])
    assert (slow.mean, slow.median, slow.repetitions) == (6.0, 6.0, 3)
    assert (slow.least, slow.greatest) == (4.0, 8.0)
    assert str(slow) == "6.000 (4.000–8.000)"
    gpu = dataclasses.replace(CPU, device=torch.device("cuda"))
    rows_of = {part: row_of("x", case, 4.0, part) for part in ("inference", "forward", "total")}
    shares = {part: row.fraction(gpu) for part, row in rows_of.items()}
    assert shares == {"inference": pytest.approx(0.5), "forward": None, "total": pytest.approx(0.5)}
    assert rows_of["total"].fraction(CPU) is None
