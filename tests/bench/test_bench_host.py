"""What a call costs the host: which calls are timed, what is refused, and what is written.

No test depends on a measured time.
"""

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bench import SETTINGS, bench, installed, run, texts_of
from helpers.rows import devices

from partita.bench import host, picture, providers, rows
from partita.bench.case import Attempt, Buffers
from partita.bench.host import CASES, NEW_SHAPES, ON_DEVICE, SAME, HostCase
from partita.bench.measure import Timing
from partita.bench.providers import TORCH
from partita.cli.fresh_process import run_fresh

CPU = torch.device("cpu")


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a run short; the reference compiles nothing."""
    monkeypatch.setenv("PARTITA_BACKEND", "reference")
    monkeypatch.setattr(host, "CALLS", {"cpu": (1, 1), "cuda": (2, 2)})
    monkeypatch.setattr(host, "NEW_SHAPE_CALLS", 1)
    monkeypatch.setattr(host, "WARM_UP_CALLS", 1)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {"machine", "version"} <= {row["op"] for row in rows}
    return [row for row in rows if row["op"] not in ("machine", "version")]


def test_every_case_has_its_unit_and_known_providers() -> None:
    measured = {(case.op, name, case.variant) for case in CASES for name in case.providers}
    for case in CASES:
        assert "partita" in case.providers
        assert set(case.providers) <= {*host.ALWAYS, *host.PEERS}
        assert case.unit in measured


@devices
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_runs_and_gives_gradients(
    case: HostCase, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setenv("PARTITA_BACKEND", "reference")
    inputs = case.inputs(Buffers(torch.device(device)), 3 if case.variant == NEW_SHAPES else 0)
    assert bool(case.case.learned) == (case.op not in ("ctc_align", "viterbi"))
    for name in {"torch", "partita"} & set(case.providers):
        function, provider = case.served_by(name)
        given: list[tuple[Any, ...]] = []

        def called(*arguments: Any, function: Any = function, given: Any = given) -> Any:
            given.append(arguments)
            return function(*arguments)

        assert case.step(Attempt(called, inputs, provider))().isfinite().all()
        for leaf in given[0][: case.case.learned]:
            assert leaf.grad is not None and leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("op", ["ctc_loss", "cross_entropy"])
def test_new_shapes_are_new(op: str) -> None:
    case = next(case for case in CASES if case.op == op and case.variant == NEW_SHAPES)
    inputs = [case.inputs(Buffers(CPU), number) for number in (*range(1, 250), 600)]
    assert len({tuple(tuple(x.shape) for x in each) for each in inputs}) == len(inputs)
    if op == "ctc_loss":
        assert inputs[-1].target_lengths.unique().numel() > 1


def test_table_csv_and_picture(
    few_calls: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new folder"
    command = "host softmax ctc_loss ctc_align --quick --only-ours --device cpu"
    assert bench(command, "--out", str(out)) == 0
    rows = read(out / "host.csv")
    assert [(row["op"], row["variant"], row["provider"]) for row in rows] == [
        *(("softmax", SAME, name) for name in ("torch", "partita")),
        ("cross_entropy", SAME, "torch"),  # the unit of ctc_align
        *(
            ("ctc_loss", variant, name)
            for variant in (SAME, ON_DEVICE, NEW_SHAPES)
            for name in ("torch", "partita")
        ),
        ("ctc_align", SAME, "partita"),
    ]
    times = {(row["op"], row["variant"], row["provider"]): float(row["host_us"]) for row in rows}
    for row in rows:
        assert 0 < float(row["host_us"]) <= float(row["host_median_us"])
        assert row["waited_us"] == row["kernels"] == row["device_us"] == row["note"] == ""
        op = row["unit"].removeprefix("torch ")
        unit = times[op, row["variant"] if row["variant"] == NEW_SHAPES else SAME, "torch"]
        ratio = float(row["host_us"]) / unit
        assert float(row["ratio"]) == pytest.approx(ratio, rel=1e-3, abs=1e-3)
    assert next(r["unit"] for r in rows if r["op"] == "ctc_align") == "torch cross_entropy"
    printed = capsys.readouterr().out
    title = "softmax: forward + backward of a tiny input, us; ratio to torch softmax"
    assert f"\n{title}\n" in printed
    assert "waited for  ratio" in printed
    assert printed.count("a new shape at every call") == 2
    texts = texts_of(out / "host.svg")
    assert {"partita", "torch", "softmax", "lengths", "on the device"} <= texts
    assert host.render(rows, "a CPU", "svg").startswith(b"<?xml")


def test_first_calls_use_one_cache_that_starts_empty(
    few_calls: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caches: list[tuple[str, Path, bool]] = []

    def fake(function: Any, *arguments: str, environment: dict[str, str]) -> float:
        assert function is host.seconds
        folder = Path(environment["TRITON_CACHE_DIR"])
        caches.append((arguments[1], folder, not folder.exists()))
        folder.mkdir(parents=True, exist_ok=True)
        return 2.0 if caches[-1][2] else 0.5

    monkeypatch.setattr(host, "run_fresh", fake)
    path = tmp_path / "host.csv"
    command = "host softmax --quick --cold --only-ours --device cpu"
    assert bench(command, "--csv", str(path)) == 0
    names = ["torch", "torch", "partita", "partita", "partita"]
    assert [name for name, *_ in caches] == names
    assert [empty for *_, empty in caches] == [True, True, True, True, False]
    assert caches[3][1] == caches[4][1] and len({folder for _, folder, _ in caches}) == 4
    assert not any(folder.exists() for _, folder, _ in caches)
    rows = [row for row in read(path) if row["variant"] == host.FIRST_CALL]
    assert [(r["provider"], r["empty_cache_s"], r["filled_cache_s"]) for r in rows] == [
        ("torch", "2", ""),
        ("partita", "2", "0.5"),
    ]
    printed = capsys.readouterr().out
    assert "\nThe first call of a process\n" in printed
    assert "2.00             0.50" in printed


def test_a_first_call_runs_in_a_process_of_its_own() -> None:
    assert run_fresh(host.seconds, "softmax", "torch", "cpu") > 0


def test_a_first_call_that_fails_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(host, "run_fresh", fails)
    row = host.first_call("softmax", "partita", CPU)
    assert row["empty_cache_s"] is None and row["note"] == "refuses: no compiler"
    assert host.failures([row]) == ["softmax, first call: partita refuses: no compiler"]


def _replaced(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Replace providers of softmax, which becomes the only case."""
    case = dataclasses.replace(host.usual_case("softmax"), functions=functions)
    monkeypatch.setattr(host, "CASES", (case,))


def test_ours_must_be_right(
    few_calls: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def drifts(logits: torch.Tensor) -> torch.Tensor:
        calls.append(logits)
        return torch.softmax(logits, -1) + 0.1 * (len(calls) > 1)  # not the first

    _replaced(monkeypatch, partita=drifts)
    assert bench("host softmax --quick --only-ours --device cpu") == 1
    printed = capsys.readouterr()
    assert "partita bench: softmax: partita wrong: " in printed.err
    assert " ulp at [" in printed.out


def test_a_peer_may_refuse_or_be_absent(
    few_calls: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("too narrow\nby far")

    gone = dataclasses.replace(providers.choose(["quack"])[-1], packages=("no_such_package",))
    monkeypatch.setattr(providers, "PEERS", (TORCH, installed("liger"), gone))
    _replaced(monkeypatch, liger=refuses)
    command = "host softmax --quick --peers liger,quack --device cpu"
    assert bench(command) == 0
    printed = capsys.readouterr().out
    assert "quack: not installed (pip install quack-kernels)\n" in printed
    assert "refuses: ValueError: too narrow\n" in printed


def test_an_interrupted_run_writes_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    time_round = host.Trial.time_round

    def interrupted(trial: host.Trial) -> None:
        if trial.provider == "partita":
            raise KeyboardInterrupt
        time_round(trial)

    monkeypatch.setattr(host.Trial, "time_round", interrupted)
    path = tmp_path / "host.csv"
    assert bench("host softmax --device cpu --only-ours", "--csv", str(path)) == 130
    assert [row["provider"] for row in read(path)] == ["torch"]


def test_the_sweep_by_do_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(SETTINGS, elements=2**28, quick=False, do_bench=True)
    cases = list(rows.softmax_cases(settings))
    assert [case.shape for case in cases] == [(4096, 128 * n) for n in range(2, 100)]
    calls = []

    def fake(call: Callable[[], object]) -> Timing:
        calls.append(call())
        return Timing.of([2.0])

    monkeypatch.setattr(rows, "time_do_bench", fake)
    small = rows.DoBenchSweep("softmax", torch.float32, 8, 256)
    (row,) = run([small], TORCH)
    assert (row.part, row.timing, row.moved) == ("do_bench", Timing.of([2.0]), 2 * 4 * 8 * 256)
    assert calls[0].shape == (8, 256)
    assert picture.panels([row]) == [[row]]


@pytest.mark.gpu
def test_kernels_of_a_call_are_counted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(1000, device=device)
    work = host.device_work(lambda: (x + 1, x.clone()), device)
    assert work is not None and work[0] == 2 and work[1] > 0
