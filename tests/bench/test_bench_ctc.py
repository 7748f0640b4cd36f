"""The benchmark of CTC and transducers: sizes, verdicts, and the calls of the peers."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.bench import (
    inputs_of,
    installed,
    machine_with,
    note_of_wrong,
    print_tables,
    row_of,
    run,
    run_as,
    sparse_logz,
    stand_in,
    with_gradient_times,
)
from helpers.rows import devices
from torch import Tensor

import partita
from partita.bench import chain, ctc, providers, report, rnnt
from partita.bench.providers import PARTITA, TORCH

LOSS = ctc.Loss("ctc", torch.float32, 40, 6, 8, 5, 12)
CRF = ctc.Crf("ctc_crf", torch.float32, 40, 3, 5, 6, 12, 2)
ALIGN = ctc.Align("ctc_align", torch.float32, 40, 3, 8, 5, 12)
RNNT = rnnt.RNNT("rnnt", torch.float32, 2, 8, 3, 5)


def test_inputs() -> None:
    inputs = inputs_of(LOSS)
    assert (inputs.logits.shape, inputs.targets.shape) == ((40, 6, 8), (6, 12))
    assert inputs.targets.min() >= 1 and inputs.targets.max() <= 7
    assert int(inputs.target_lengths.min()) >= 5 and int(inputs.target_lengths.max()) == 12
    assert inputs.input_lengths.tolist() == [40] * 6
    assert torch.equal(inputs.targets, inputs_of(LOSS).targets)
    crf = inputs_of(CRF)
    assert (crf.scores.shape, crf.source.tolist()) == (CRF.shape, chain.kmers(16).tolist())
    assert torch.equal((crf.targets > 0).sum(1), crf.target_lengths) and int(crf.targets.max()) <= 4
    align = inputs_of(ALIGN)
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
    cases = [dataclasses.replace(case, dtype=dtype) for case in (LOSS, ALIGN)]
    rows = run(cases, PARTITA, TORCH, machine=machine_with(device))
    assert [(row.case.op, row.provider, row.part) for row in rows if row.timing] == [
        *(("ctc", name, part) for name in ("partita", "torch") for part in report.PARTS[:4]),
        ("ctc_align", "partita", "inference"),
    ]
    assert all(row.error <= (1e-6 if row.provider == "partita" else 1e-3) for row in rows)


def test_a_wrong_gradient_of_a_transducer_is_found() -> None:
    note_of_wrong(RNNT, with_gradient_times(1.1, PARTITA.ops["rnnt"]()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@devices
def test_the_recipe_of_basecallers_is_right(device: str, dtype: torch.dtype) -> None:
    rows = run([dataclasses.replace(CRF, dtype=dtype)], TORCH, machine=machine_with(device))
    assert [row.part for row in rows if row.timing] == ["inference", "forward", "backward", "total"]
    assert all(row.error <= (1e-4 if dtype == torch.float32 else 1e-11) for row in rows)


def test_the_bound_of_peers_is_looser_than_the_contract() -> None:
    ours = PARTITA.ops["ctc"]()
    slightly, badly = (with_gradient_times(factor, ours) for factor in (1.001, 1.05))
    assert all(row.timing for row in run_as("another", LOSS, slightly))
    assert note_of_wrong(LOSS, slightly, "partita").endswith(", allowed 2e-06")
    assert note_of_wrong(LOSS, badly).endswith(", allowed 0.01")
    longer = dataclasses.replace(LOSS, steps=4000)
    assert LOSS.contract(PARTITA) == longer.contract(PARTITA)
    assert longer.contract(TORCH)[0] == pytest.approx(0.1)


@pytest.mark.parametrize("sequence", [0, 3, 5])
@pytest.mark.parametrize("factor", [0.5, torch.nan])
def test_every_sequence_counts(factor: float, sequence: int) -> None:
    only = with_gradient_times(factor, PARTITA.ops["ctc"](), where=(slice(None), sequence))
    assert f", {sequence}, " in note_of_wrong(LOSS, only)


@pytest.mark.parametrize("case", [LOSS, CRF], ids=lambda case: case.op)
def test_a_wrong_loss_is_not_timed(case: ctc.CTCLossCase) -> None:
    right = TORCH.ops[case.op]()
    note_of_wrong(case, lambda *inputs: right(*inputs) + 100)
    note = note_of_wrong(case, lambda *inputs: right(*inputs) * torch.nan)
    assert note.startswith("wrong: inf")


@pytest.mark.parametrize("step", [0, 20, 39])
@pytest.mark.parametrize("label", [-1, 8, "another"])
def test_an_alignment_that_does_not_emit_the_target_is_wrong(label: int | str, step: int) -> None:
    def broken(*inputs: Tensor) -> Tensor:
        labels = partita.ctc_align(*inputs).labels
        labels[1, step] = (labels[1, step] + 3) % 8 if label == "another" else label
        return labels

    assert "at [1]" in note_of_wrong(ALIGN, broken)


def test_an_alignment_that_is_not_the_best_is_wrong() -> None:
    note_of_wrong(ALIGN, lambda x, *others: partita.ctc_align(-x, *others).labels)


def test_the_best_score() -> None:
    inputs = inputs_of(ALIGN)
    inputs = inputs._replace(targets=inputs.targets % 2 + 1)  # with repeats
    expected = partita.ctc_align(*inputs).score
    torch.testing.assert_close(ctc.best_scores(*inputs).float(), expected, rtol=1e-6, atol=0)


def test_koi_is_called_as_it_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def logz_of_targets(stay: Tensor, move: Tensor, lengths: Tensor) -> Tensor:
        assert (stay.shape, move.shape) == ((40, 3, 11), (40, 3, 10))
        assert stay.is_contiguous() and move.is_contiguous()
        return ctc._loop_aligned(stay, move, lengths)

    members = {"logZ_cu_sparse": sparse_logz, "logZ_cu": logz_of_targets, "Log": partita.Log}
    stand_in(monkeypatch, "koi.ctc", **members)
    rows = run([LOSS, CRF], installed("koi"))
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

    members = {"_Logz": SimpleNamespace(apply=apply), "_fwd_bwd_cupy": "kernel", "Log": "Log"}
    stand_in(monkeypatch, "seqdist.ctc", prepare_inputs=prepare, **members)
    rows = run([LOSS, CRF], installed("seqdist"))
    assert [(row.case.op, bool(row.timing)) for row in rows] == [("ctc", True)] * 4


def test_torchaudio_is_called_as_it_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from partita.integrations.torchaudio import forced_align

    def align(log_probs: Tensor, targets: Tensor, *lengths: Tensor) -> tuple[Tensor, Tensor]:
        assert log_probs.shape == (1, 40, 8) and log_probs.is_contiguous()
        return forced_align(log_probs, targets, *lengths)

    stand_in(monkeypatch, "torchaudio.functional", forced_align=align)
    peer = dataclasses.replace(providers.choose(["torchaudio"])[-1], packages=())
    one, several = run([dataclasses.replace(ALIGN, sequences=1), ALIGN], peer)
    assert one.timing and several.note == "refuses: takes one sequence only"


def test_what_the_libraries_cannot_take() -> None:
    def reason(longest: int, device: str = "cuda", dtype: Any = torch.float32) -> str | None:
        inputs = inputs_of(LOSS)
        logits = SimpleNamespace(device=torch.device(device), dtype=dtype)
        return ctc.beyond_seqdist(inputs._replace(logits=logits, targets=torch.ones(2, longest)))

    assert reason(511) is reason(511, dtype=torch.float64) is None
    assert reason(512) == "takes at most 511 labels"
    assert reason(9, device="cpu") == "needs a GPU"
    assert reason(9, dtype=torch.bfloat16) == "takes fp32 and fp64 logits only"
    koi = providers.choose(["koi"])[-1]
    for case in (CRF, chain.LogZ("chain", torch.float32, 2, 2, 4, chain.kmers)):
        assert koi.refusal(case.op, inputs_of(case)) == "needs a GPU"
    rows = run([LOSS, CRF], *providers.choose(["koi", "seqdist"])[-2:])
    assert [row.note for row in rows] == ["refuses: needs a GPU"] * 2


def test_times_faster(capsys: pytest.CaptureFixture[str]) -> None:
    longer = dataclasses.replace(LOSS, steps=400)
    rows = [
        row_of("partita", LOSS, 2.0),
        row_of("torch", LOSS, 5.0),
        row_of("seqdist", LOSS, 4.0),
        row_of("partita", longer, 1.0),
        row_of("torch", longer, None),
    ]
    print_tables(rows)
    printed = capsys.readouterr().out
    table = printed.partition("ctc fp32, total: times faster than torch\n")[2].splitlines()
    assert [line.split()[-3:] for line in table[2:3]] == [["2.50", "1.00", "1.25"]]
    assert table[3].split()[-1] == "refuses" and "." not in table[3]
    print_tables(rows[:1])
    assert "faster" not in capsys.readouterr().out
