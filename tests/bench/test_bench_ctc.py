"""The benchmark of CTC: its sizes, how results are judged, and what the peers are called with."""

import dataclasses
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from helpers.bench import CPU, SETTINGS, devices, read, run
from torch import Tensor

import partita
from partita.__main__ import main
from partita.bench import chain, ctc, picture, providers, report
from partita.bench.case import Buffers, Provider
from partita.bench.measure import Timing
from partita.bench.providers import PARTITA, TORCH
from partita.bench.runner import Row
from partita.cli.console import print_table

LOSS = ctc.Loss("ctc", torch.float32, 40, 6, 8, 5, 12)
CRF = ctc.Crf("ctc_crf", torch.float32, 40, 3, 5, 6, 12, 2)
ALIGN = ctc.Align("ctc_align", torch.float32, 40, 3, 8, 5, 12)
needs_crf = pytest.mark.skipif(
    not hasattr(partita, "ctc_crf_loss"), reason="there is no ctc_crf_loss"
)


def named(name: str, function: object) -> Provider:
    return Provider(name, {op: lambda: function for op in ("ctc", "ctc_crf", "ctc_align")})


def off_by(factor: float, sequences: slice = slice(None)) -> object:
    """Return the loss with a gradient that is `factor` times the truth for some sequences."""

    def function(logits: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        factors = torch.ones_like(logits)
        factors[:, sequences] = factor
        scaled = logits.detach() + factors * (logits - logits.detach())
        return PARTITA.ops["ctc"]()(scaled, targets, *lengths)

    return function


def test_sizes() -> None:
    def shapes(op: str, **changes: object) -> list[tuple[int, ...]]:
        settings = dataclasses.replace(
            SETTINGS, **{"columns": (), "elements": None, "dtypes": (torch.float32,), **changes}
        )
        cases = [case for case in ctc.ctc_cases(settings) if case.op == op]
        return [(*case.shape, case.shortest, case.longest) for case in cases]

    gpu = torch.device("cuda")
    full = shapes("ctc", device=gpu, quick=False)
    assert [shape[:3] for shape in full[:3]] == [
        (500, 128, 20),
        (1000, 64, 32),
        (150, 128, 5000),
    ] and len(full) == 10
    assert full[5] == (30000, 1, 32, 2000, 2500)
    assert shapes("ctc", device=gpu) == [full[0], full[6]]
    assert shapes("ctc", quick=False) == [(500, 32, 20, 80, 100), (400, 4, 5000, 40, 40)]
    assert shapes("ctc") == [(60, 4, 20, 8, 12), (64, 4, 32, 16, 16)]
    assert shapes("ctc", device=gpu, columns=(1, 100)) == [
        (500, 128, 2, 80, 100),
        (500, 128, 100, 80, 100),
    ]
    assert shapes("ctc", elements=2 * 60 * 20)[0] == (60, 2, 20, 8, 12)
    assert shapes("ctc", elements=200)[0] == (10, 1, 20, 5, 5)
    assert shapes("ctc_crf", device=gpu, quick=False) == [(2000, 64, 1024, 5, 300, 500)]
    assert shapes("ctc_crf", elements=320) == [(16, 1, 4, 5, 8, 8)]
    assert shapes("ctc_align", device=gpu, quick=False) == [(180000, 1, 32, 20000, 20000)]
    cases = list(ctc.ctc_cases(dataclasses.replace(SETTINGS, columns=())))
    assert [(case.op, case.dtype) for case in cases] == [
        (op, dtype) for dtype in SETTINGS.dtypes for op in ("ctc", "ctc", "ctc_crf", "ctc_align")
    ]


def test_inputs() -> None:
    inputs = LOSS.inputs(Buffers(CPU.device))
    assert (inputs.logits.shape, inputs.targets.shape) == ((40, 6, 8), (6, 12))
    assert inputs.targets.min() >= 1 and inputs.targets.max() <= 7
    assert int(inputs.target_lengths.min()) >= 5 and int(inputs.target_lengths.max()) == 12
    assert inputs.input_lengths.tolist() == [40] * 6
    assert torch.equal(inputs.targets, LOSS.inputs(Buffers(CPU.device)).targets)
    crf = CRF.inputs(Buffers(CPU.device))
    assert (crf.scores.shape, crf.source.tolist()) == (CRF.shape, chain.kmers(16).tolist())
    assert torch.equal((crf.targets > 0).sum(1), crf.target_lengths) and int(crf.targets.max()) <= 4
    align = ALIGN.inputs(Buffers(CPU.device))
    torch.testing.assert_close(align.logits.exp().sum(-1), torch.ones(40, 3))


def test_bytes() -> None:
    size = 4 * 40 * 6 * 8
    assert {part: (m.bytes, m.limit) for part, m in LOSS.moves.items()} == {
        "inference": (size, "read"),
        "total": (3 * size, "copy"),
    }
    assert CRF.bytes == 4 * 40 * 3 * 16 * 5
    assert set(ALIGN.moves) == {"inference"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@devices
def test_ours_and_pytorch_are_right(device: str, dtype: torch.dtype) -> None:
    here = dataclasses.replace(CPU, device=torch.empty(0, device=device).device)
    rows = run(
        iter([dataclasses.replace(case, dtype=dtype) for case in (LOSS, ALIGN)]),
        PARTITA,
        TORCH,
        machine=here,
    )
    parts = ("inference", "forward", "backward", "total")
    expected = [("ctc", name, part) for name in ("partita", "torch") for part in parts] + [
        ("ctc_align", "partita", "inference")
    ]
    assert [(row.case.op, row.provider, row.part) for row in rows if row.timing] == expected
    assert all(row.error <= (1e-6 if row.provider == "partita" else 1e-3) for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@devices
def test_the_recipe_of_basecallers_is_right(device: str, dtype: torch.dtype) -> None:
    here = dataclasses.replace(CPU, device=torch.empty(0, device=device).device)
    rows = run(iter([dataclasses.replace(CRF, dtype=dtype)]), TORCH, machine=here)
    assert [row.part for row in rows if row.timing] == ["inference", "forward", "backward", "total"]
    assert all(row.error <= (1e-4 if dtype == torch.float32 else 1e-11) for row in rows)


@needs_crf
@devices
def test_ours_over_kmers_is_right(device: str) -> None:
    rows = run(
        iter([CRF]),
        PARTITA,
        machine=dataclasses.replace(CPU, device=torch.empty(0, device=device).device),
    )
    assert len(rows) == 4 and all(row.timing and row.error <= 1e-6 for row in rows)


def test_the_bound_of_peers_is_looser_than_the_contract() -> None:
    slightly, badly = off_by(1.001), off_by(1.05)
    assert all(row.timing for row in run(iter([LOSS]), named("another", slightly)))
    for name, function, allowed in (("partita", slightly, "2e-06"), ("another", badly, "0.01")):
        (row,) = run(iter([LOSS]), named(name, function))
        assert (
            row.timing is None
            and row.note.startswith("wrong: ")
            and row.note.endswith(f", allowed {allowed}")
        )
    truth = LOSS.standard(LOSS.inputs(Buffers(CPU.device)))
    longer = dataclasses.replace(LOSS, steps=4000)
    assert LOSS.bounds(PARTITA, truth) == longer.bounds(PARTITA, truth)
    assert longer.bounds(TORCH, truth)[0] == pytest.approx(0.1)


@pytest.mark.parametrize("sequence", [0, 3, 5])
@pytest.mark.parametrize("factor", [0.5, torch.nan])
def test_every_sequence_counts(factor: float, sequence: int) -> None:
    (row,) = run(iter([LOSS]), named("another", off_by(factor, slice(sequence, sequence + 1))))
    assert row.timing is None and row.note.startswith("wrong: ") and f", {sequence}, " in row.note


@pytest.mark.parametrize("case", [LOSS, CRF], ids=lambda case: case.op)
def test_a_wrong_loss_is_not_timed(case: ctc.CTCLossCase) -> None:
    right = TORCH.ops[case.op]()
    (row,) = run(iter([case]), named("another", lambda *inputs: right(*inputs) + 100))
    assert row.timing is None and row.note.startswith("wrong: ")
    (row,) = run(iter([case]), named("another", lambda *inputs: right(*inputs) * torch.nan))
    assert row.timing is None and row.note.startswith("wrong: inf")


@pytest.mark.parametrize("step", [0, 20, 39])
@pytest.mark.parametrize("label", [-1, 8, "another"])
def test_an_alignment_that_does_not_emit_the_target_is_wrong(label: int | str, step: int) -> None:
    def broken(*inputs: Tensor) -> Tensor:
        labels = partita.ctc_align(*inputs).labels
        labels[1, step] = (labels[1, step] + 3) % 8 if label == "another" else label
        return labels

    (row,) = run(iter([ALIGN]), named("another", broken))
    assert row.timing is None and row.note.startswith("wrong: ") and "at [1]" in row.note


def test_an_alignment_that_is_not_the_best_is_wrong() -> None:
    (row,) = run(
        iter([ALIGN]),
        named("another", lambda log_probs, *others: partita.ctc_align(-log_probs, *others).labels),
    )
    assert row.timing is None and row.note.startswith("wrong: ")


def test_the_best_score() -> None:
    inputs = ALIGN.inputs(Buffers(CPU.device))
    inputs = inputs._replace(
        targets=inputs.targets % 2 + 1, input_lengths=inputs.input_lengths
    )  # with repeats
    torch.testing.assert_close(
        ctc.best_scores(*inputs).float(), partita.ctc_align(*inputs).score, rtol=1e-6, atol=0
    )


def logz_of_kmers(
    scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, semiring: object, slots: int
) -> Tensor:
    assert (scores.dtype, source.dtype, initial.dtype, slots) == (
        torch.float32,
        torch.int32,
        torch.float32,
        1,
    )
    return chain.loop_logz(scores, source, initial, final)


def test_koi_is_called_as_it_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def logz_of_targets(stay: Tensor, move: Tensor, lengths: Tensor) -> Tensor:
        assert (
            (stay.shape, move.shape) == ((40, 3, 11), (40, 3, 10))
            and stay.is_contiguous()
            and move.is_contiguous()
        )
        return ctc._loop_aligned(stay, move, lengths)

    module = types.SimpleNamespace(logZ_cu_sparse=logz_of_kmers, logZ_cu=logz_of_targets, Log="Log")
    monkeypatch.setitem(sys.modules, "koi.ctc", module)
    koi = dataclasses.replace(providers.choose(["koi"])[-1], packages=(), beyond={})
    rows = run(iter([LOSS, CRF]), koi)
    assert [(row.case.op, bool(row.timing)) for row in rows] == [("ctc_crf", True)] * 4


def test_seqdist_is_called_as_it_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own steps: states that have blanks between labels, then log Z of each sequence."""

    def prepare(
        log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
    ) -> tuple[Tensor, ...]:
        assert targets.dtype == input_lengths.dtype == target_lengths.dtype == torch.int64
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(40, 6))
        return log_probs, targets, input_lengths, target_lengths

    def apply(log_probs: Tensor, targets: Tensor, *rest: object) -> Tensor:
        assert rest[2:] == ("kernel", "Log")
        return -F.ctc_loss(log_probs, targets, *rest[:2], reduction="none")

    module = types.SimpleNamespace(
        prepare_inputs=prepare,
        _Logz=types.SimpleNamespace(apply=apply),
        _fwd_bwd_cupy="kernel",
        Log="Log",
    )
    monkeypatch.setitem(sys.modules, "seqdist.ctc", module)
    seqdist = dataclasses.replace(providers.choose(["seqdist"])[-1], packages=(), beyond={})
    rows = run(iter([LOSS, CRF]), seqdist)
    assert [(row.case.op, bool(row.timing)) for row in rows] == [("ctc", True)] * 4


def test_torchaudio_is_called_as_it_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from partita.integrations.torchaudio import forced_align

    def align(log_probs: Tensor, targets: Tensor, *lengths: Tensor) -> tuple[Tensor, Tensor]:
        assert log_probs.shape == (1, 40, 8) and log_probs.is_contiguous()
        return forced_align(log_probs, targets, *lengths)

    monkeypatch.setitem(
        sys.modules, "torchaudio.functional", types.SimpleNamespace(forced_align=align)
    )
    torchaudio = dataclasses.replace(providers.choose(["torchaudio"])[-1], packages=())
    one, several = run(iter([dataclasses.replace(ALIGN, sequences=1), ALIGN]), torchaudio)
    assert one.timing and several.note == "refuses: takes one sequence only"


def test_what_the_libraries_cannot_take() -> None:
    def reason(
        longest: int, device: str = "cuda", dtype: torch.dtype = torch.float32
    ) -> str | None:
        inputs = LOSS.inputs(Buffers(CPU.device))
        logits = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
        return ctc.beyond_seqdist(inputs._replace(logits=logits, targets=torch.ones(2, longest)))

    assert reason(511) is reason(511, dtype=torch.float64) is None
    assert reason(512) == "takes at most 511 labels"
    assert reason(9, device="cpu") == "needs a GPU"
    assert reason(9, dtype=torch.bfloat16) == "takes fp32 and fp64 logits only"
    (koi,) = providers.choose(["koi"])[-1:]
    for case in (CRF, chain.LogZ("chain", torch.float32, 2, 2, 4, chain.kmers)):
        assert koi.refusal(case.op, case.inputs(Buffers(CPU.device))) == "needs a GPU"
    rows = run(iter([LOSS, CRF]), *providers.choose(["koi", "seqdist"])[-2:])
    assert [row.note for row in rows] == ["refuses: needs a GPU"] * 2


def print_summary(rows: list[Row]) -> None:
    for table in report.summary(rows, CPU):
        print_table(*table)


def test_times_faster(capsys: pytest.CaptureFixture[str]) -> None:
    def row(case: ctc.CTCCase, provider: str, milliseconds: float | None) -> Row:
        timing = None if milliseconds is None else Timing.of([milliseconds])
        return Row(
            case,
            provider,
            "" if timing is None else "total",
            timing,
            0.0,
            None,
            "" if timing else "refuses: no",
        )

    longer = dataclasses.replace(LOSS, steps=400)
    rows = [
        row(LOSS, "partita", 2.0),
        row(LOSS, "torch", 5.0),
        row(LOSS, "seqdist", 4.0),
        row(longer, "partita", 1.0),
        row(longer, "torch", None),
    ]
    print_summary(rows)
    printed = capsys.readouterr().out
    table = printed.partition("ctc fp32, total: times faster than torch\n")[2].splitlines()
    assert [line.split()[-3:] for line in table[2:3]] == [["2.50", "1.00", "1.25"]]
    assert table[3].split()[-1] == "refuses" and "." not in table[3]
    print_summary([row(LOSS, "partita", 2.0)])
    assert "faster" not in capsys.readouterr().out


def test_a_panel_for_each_loss_and_dtype() -> None:
    half = dataclasses.replace(LOSS, dtype=torch.bfloat16)
    rows = [
        Row(case, "partita", "total", Timing.of([1.0]), 0.0, None, "") for case in (LOSS, CRF, half)
    ]
    align = Row(ALIGN, "partita", "inference", Timing.of([1.0]), 0.0, None, "")
    assert [panel.rows for panel in picture.panels([*rows, align])] == [
        rows[:1],
        rows[1:2],
        rows[2:],
    ]


@needs_crf
def test_table_csv_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--quick",
        "--dtype",
        "fp32",
        "--repetitions",
        "2",
        "--peers",
        "torch",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert main(["bench", "ctc", *arguments]) == 0
    measured = read(tmp_path / "bench.csv")[1]
    parts = {(row["op"], row["provider"], row["part"]) for row in measured}
    assert parts == {
        (op, name, part)
        for op in ("ctc", "ctc_crf")
        for name in ("partita", "torch")
        for part in report.PARTS[:4]
    } | {("ctc_align", "partita", "inference")}
    found = {
        tuple(row[name] for name in ctc.CTCCase.sizes) for row in measured if row["op"] == "ctc"
    }
    assert found == {("60", "4", "20", "8", "12"), ("64", "4", "32", "16", "16")}
    assert {
        (row["states"], row["slots"], row["sequences"])
        for row in measured
        if row["op"] == "ctc_crf"
    } == {("16", "5", "2")}
    assert all(
        float(row["error"]) <= (4e-6 if row["provider"] == "partita" else 1e-2) for row in measured
    )
    texts = [
        element.text
        for element in ElementTree.parse(tmp_path / "bench.svg").iter()
        if element.tag.endswith("text")
    ]
    assert {
        "partita",
        "torch",
        "copy",
        "60 × 4 ×",
        "CTC loss and its gradient, fp32 logits, CPU",
    } <= set(texts)
    printed = capsys.readouterr().out
    for title in (
        "ctc fp32",
        "ctc fp32, total: times faster than torch",
        "ctc_crf fp32",
        "ctc_align fp32",
    ):
        assert f"\n{title}\n" in printed


def test_ours_must_be_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = {
        "ctc": lambda: off_by(1.01),
        "ctc_crf": lambda: ctc.loop_crf_loss,
        "ctc_align": PARTITA.ops["ctc_align"],
    }
    monkeypatch.setattr(providers, "OURS", (dataclasses.replace(PARTITA, ops=broken),))
    arguments = [
        "--quick",
        "--dtype",
        "fp64",
        "--repetitions",
        "2",
        "--device",
        "cpu",
        "--only-ours",
        "--csv",
        str(tmp_path / "times.csv"),
    ]
    assert main(["bench", "ctc", *arguments]) == 1
    assert capsys.readouterr().err.count("partita wrong: ") == 2
    rows = read(tmp_path / "times.csv")[1]
    assert [row["op"] for row in rows if row["note"].startswith("wrong:")] == ["ctc"] * 2
