"""The command line: `partita info`, `partita check`, and what all commands share."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fresh import SOURCE, run_fresh

import partita
from partita.__main__ import main
from partita.cli import check as _check_machine
from partita.cli import console as _console
from partita.cli import info as _info
from partita.testing.samples import CALLS


def test_the_commands_need_torch_alone() -> None:
    arrays = ("numpy", "numba", "triton", "matplotlib", "pandas", "scipy", "sklearn")
    models = ("transformers", "trl", "peft", "koi", "torchaudio", "pyctcdecode")
    code = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({arrays + models}))
import partita
from partita.__main__ import main

for name in partita.integrations.__all__:
    importlib.import_module("partita.integrations." + name)
assert "torch._dynamo" not in sys.modules
assert main(["info"]) == 0
for command in ("check", "bench", "warm", "report"):
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0
for package in ("bench", "cli", "integrations", "testing"):
    for module in pkgutil.iter_modules([partita.__path__[0] + "/" + package]):
        if module.name != "read_kernel":  # a kernel of Triton
            importlib.import_module("partita." + package + "." + module.name)
"""
    finished = run_fresh(code)
    assert finished.code == 0, finished.stderr


def test_a_reader_that_ends_early_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141 and errors == b""


NOT_A_DEVICE = "--device: cannot use 'nowhere': "


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("", "partita: the following arguments are required: command"),
        ("chess", "partita: argument command: invalid choice: 'chess'"),
        ("info --fast", "partita info: unrecognized arguments: --fast; see partita info --help"),
        ("check softmax", "check: unrecognized arguments: softmax; see partita check --help"),
        ("check --device nowhere", NOT_A_DEVICE),
        ("check --device mps", "cannot use 'mps': expected cpu, cuda or cuda:1"),
        ("check --device meta", "cannot use 'meta': expected cpu, cuda or cuda:1"),
        ("bench chess", "partita bench: op: expected some of softmax, cross_entropy, "),
        ("bench --peers nobody", "--peers: expected some of torch, torch-linear, "),
        ("bench --dtype fp8", "expected some of fp16,bf16,fp32,fp64, got 'fp8'"),
        ("bench --columns 8,-1", "expected positive whole numbers, got '8,-1'"),
        ("bench --elements 1,2", "expected one positive whole number, got '1,2'"),
        ("bench --device nowhere", NOT_A_DEVICE),
        ("bench softmax host", "got 'host'; it comes first"),
        ("bench softmax --cold", "--cold: belongs to `partita bench host`"),
        ("bench ctc --do-bench", "--do-bench: times softmax"),
        ("bench softmax --do-bench --device cpu", "--do-bench: needs a GPU and Triton"),
        ("bench host chess", "host: expected some of softmax, cross_entropy, "),
        ("bench host --columns 8", "--columns: host has inputs of its own"),
        ("bench host --peers nobody", "--peers: expected some of torch, "),
        ("bench host --device nowhere", NOT_A_DEVICE),
        ("warm chess", "op: expected some of softmax, log_softmax, "),
        ("warm softmax --dtype fp8", "expected some of fp16,bf16,fp32,fp64, got 'fp8'"),
        ("warm softmax --rows 0", "expected positive whole numbers, got '0'"),
        ("warm softmax --device cpu", "op: PyTorch serves softmax on a CPU, and compiles"),
        ("warm logz --hidden 8", "--hidden: a size of linear_cross_entropy, "),
        ("warm softmax --width 8", "unrecognized arguments: --width 8"),
    ],
)
def test_wrong_arguments(command: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(command.split())
    except SystemExit as stop:
        code = stop.code
    out, error = capsys.readouterr()
    assert (code, out) == (2, "")
    assert expected in error
    assert error.count("\n") == 1


def lines_of(printed: str) -> dict[str, str]:
    """By their first word."""
    return {line.split()[0]: line for line in printed.splitlines() if line.split()}


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    lines = lines_of(printed)
    assert torch.__version__ in lines["torch"]
    for op in _info.OPS:
        assert any(server in lines[op] for server in ("PyTorch", "Triton", "Numba"))
    for index in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(index) in lines[f"cuda:{index}"]
    assert ("No GPU: " in printed) == (torch.cuda.device_count() == 0)
    assert "batch-invariant inside batch_invariant() and with PARTITA_BATCH_INVARIANT=1" in printed
    monkeypatch.setenv("PARTITA_BATCH_INVARIANT", "1")
    assert main(["info"]) == 0
    assert "Linear heads are batch-invariant: " in capsys.readouterr().out


def test_info_says_what_is_missing_and_what_brings_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_info, "version", lambda package: None)
    monkeypatch.setenv("PARTITA_BACKEND", "numba")
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    lines = lines_of(printed)
    for package, (_, command) in _info.EXTRAS.items():
        assert re.search(rf"^{package} +not installed", printed, re.MULTILINE)
        assert command in " ".join(printed.split())
    assert "none: backend 'numba': this op has no Numba kernel" in lines["softmax"]
    assert "PARTITA_BACKEND=numba" in printed


def test_the_ops_of_info_are_all() -> None:
    tables = ("debruijn_source", "dense_source", "edges_from_states")
    others = (
        "backend",
        "batch_invariant",
        "hmm",
        "nn",
        "parallel",
        "testing",
        "integrations",
        "linear_cross_entropy_plan",
        "linear_rnnt_plan",
        *("stitch", "rnnt_greedy_search", "rnnt_beam_search"),
        "word_spans",
        *tables,
    )
    functions = {name for name in partita.__all__ if name.islower() and name not in others}
    assert functions <= set(_info.OPS)
    assert all(hasattr(partita.Chain, op) for op in set(_info.OPS) - functions)


def table_of(printed: str) -> list[list[str]]:
    """Return the cells of each line: op, dtype, error, bound, PyTorch's error, result."""
    return [
        cells
        for line in printed.splitlines()
        if len(cells := [c.strip() for c in line.split("  ") if c.strip()]) >= 3
        and cells[1] in _check_machine.DTYPES
    ]


@pytest.mark.long
@pytest.mark.parametrize("instructions", ["default", "avx2"])
def test_check_passes_on_cpus_with_fewer_instructions(instructions: str) -> None:
    """Check what PyTorch serves. The kernels of Numba do not depend on PyTorch's choice."""
    code = """
from partita.__main__ import main
from partita.cli import check

check.CALLS = {name: call for name, call in check.CALLS.items() if not call.numba}
raise SystemExit(main(["check", "--device", "cpu"]))
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "ATEN_CPU_CAPABILITY": instructions,  # which PyTorch reads when it starts
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr


# A GPU compiles hundreds of kernels for each dtype, so each has a test of its own there.
@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "dtypes"),
    [
        ("cpu", tuple(_check_machine.DTYPES)),
        pytest.param("cuda", ("fp32",), marks=pytest.mark.gpu),
        pytest.param("cuda", ("bf16",), marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_check_passes(
    device: str,
    dtypes: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {name: _check_machine.DTYPES[name] for name in dtypes}
    monkeypatch.setattr(_check_machine, "DTYPES", chosen)
    code = main(["check", "--device", device])
    printed = capsys.readouterr().out
    assert code == 0, printed
    table = table_of(printed)
    assert len(table) == len(dtypes) * len(CALLS)
    assert {cells[0] for cells in table} == {*CALLS}
    assert all(cells[-1] == "pass" for cells in table)
    assert max(map(len, printed.splitlines())) <= 80
    assert all(float(error) <= 1.05 * float(bound) for _, _, error, bound, *_ in table)
    assert f"{len(table)} passed, 0 failed" in printed


def _fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel\nat all")


BROKEN: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "inexact": (lambda x: torch.softmax(x, -1) * 1.1, " ulp at ["),
    "unwritten": (lambda x: torch.softmax(x, -1) + 0 * torch.empty_like(x), "got nan"),
    "wrong gradient": (
        lambda x: (y := torch.softmax(x, -1)) + 0.1 * (y - y.detach()),
        "backward: ",
    ),
    "raises": (_fails, "RuntimeError: no kernel\n"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_check_finds_what_is_wrong(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, note = BROKEN[kind]
    softmax = CALLS["softmax"]
    broken = dataclasses.replace(softmax, function=lambda input, dim: function(input), options={})
    monkeypatch.setattr(_check_machine, "CALLS", {"softmax": broken})
    assert main(["check", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == 4
    assert " ".join(printed.split()).count(note.strip()) == 4
    assert "0 passed, 4 failed" in printed


@pytest.mark.parametrize("field", ["tokens", "scores"])
def test_check_finds_a_decoder_that_is_wrong(
    field: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CALLS["ctc_beam_search"]

    def decode(**inputs: Any) -> partita.Hypotheses:
        found = call.function(**inputs)
        shift = inputs["log_probs"].dtype == torch.float32  # the truth is fp64
        return found._replace(**{field: getattr(found, field) + shift})

    broken = dataclasses.replace(call, function=decode)
    monkeypatch.setattr(_check_machine, "CALLS", {"ctc_beam_search": broken})
    assert main(["check", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == 1 and "is beyond its bound" in " ".join(printed.split())


def test_check_leaves_out_what_the_backend_cannot_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_BACKEND", "numba")
    assert main(["check", "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "cpu is left out: backend 'numba'" in printed.out
    assert printed.err == "partita check: nothing is left to check\n"


def test_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    rows = [["softmax", "1.5", "[fast]"], ["x", "10.25", ""]]
    _console.print_table(_console.Table("A title", ["op", "ms", ""], rows))
    expected = "op          ms\n-------  -----\nsoftmax    1.5  [fast]\nx        10.25\n"
    assert capsys.readouterr().out == f"\nA title\n{expected}"


def test_tables_that_are_wider_than_the_terminal_lose_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    providers = [f"provider-number-{i}" for i in range(9)]
    notes = "refuses: " + "several words of a long reason " * 5
    rows = [[f"row{r}", "bf16", *(f"{r}{i}.5 %" for i in range(9)), notes] for r in range(3)]
    header = ["op", "dtype", *providers, ""]
    _console.print_table(_console.Table("A title", header, rows, left=2))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    words = printed.split()
    assert set(providers) <= set(words)
    for r in range(3):
        assert [w for w in words if w.startswith(str(r)) and w.endswith(".5")] == [
            f"{r}{i}.5" for i in range(9)
        ]
    parts = printed.count("A title")
    assert parts > 2 and all(words.count(key) == parts for key in ("row0", "row1", "row2"))
    assert words.count("reason") == 15


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(_console, "SECONDS_BETWEEN_LINES", -1.0)
    with _console.Progress(2) as progress:
        for name in ("one", "two"):
            progress.say(name)
            progress.advance()
    printed = capsys.readouterr()
    assert printed.out == ""
    if terminal:
        assert "[1/2] two, 0 s left" in printed.err
    else:
        assert printed.err == "[0/2] one\n[1/2] two\n"


@pytest.mark.parametrize("ops", [["softmax"], ["host", "softmax"]], ids=lambda ops: ops[0])
def test_bench_looks_at_its_files_before_it_measures(
    ops: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for option, path, reason in (
        ("--csv", tmp_path, "is a folder; expected a file to write"),
        ("--out", tmp_path / "file", "cannot be written: "),
        ("--svg", tmp_path / ("x" * 300), "cannot be written: "),
    ):
        assert main(["bench", *ops, option, str(path)]) == 2
        out, error = capsys.readouterr()
        assert error.startswith(f"partita bench: {path}") and error.count("\n") == 1
        assert reason in error and out == ""
