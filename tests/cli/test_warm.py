"""`partita warm`: its arguments, its ops, and what it says; the ops run on the CPU here."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from partita.__main__ import main
from partita.cli import info, warm
from partita.cli.warm import OPS, WarmResult

TINY = {
    "rows": (4,),
    "classes": (16,),
    "hidden": (8,),
    "steps": (6,),
    "batch": (2,),
    "labels": (2,),
    "states": (16,),
    "edges": (2,),
    "bases": (4,),
    "durations": (3,),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are kernels to compile."""
    monkeypatch.setattr(warm, "nothing_to_warm", lambda device: None)
    monkeypatch.setattr(warm, "cache_folder", lambda device: "/the/cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # so it is the default device


def tiny(op: str) -> dict[str, tuple[int, ...]]:
    return {name: TINY[name] for name in OPS[op].usual}


def test_all_ops_can_be_warmed() -> None:
    methods = {op.rpartition(".")[2] for op in OPS}
    assert set(info.OPS) <= methods
    assert set(warm.MEANINGS) == set(warm.SIZES)


@pytest.mark.parametrize("op", OPS)
def test_an_op_runs_forward_and_backward(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_BACKEND", "reference")
    gradients: list[int] = []
    grad = torch.autograd.grad

    def counted(*args: Any, **options: Any) -> Any:
        result = grad(*args, **options)
        gradients.append(len(result))
        return result

    monkeypatch.setattr(torch.autograd, "grad", counted)
    warmed = warm.warm_one(op, "fp32", tiny(op), "cpu")
    assert warmed.seconds > 0
    assert warmed.compiled == warmed.cached == 0
    runs = len(list(warm.combinations(tiny(op))))
    if op.endswith(("viterbi", "sample", "_align", "_search", "_decode")):
        assert not gradients
    else:  # some ops compute gradients in their own backward pass too
        assert len(gradients) >= runs * warm.CALLS


def test_ragged_sizes_are_run_with_one_less() -> None:
    sizes = {"steps": (32,), "batch": (1,), "classes": (5, 7)}
    assert [tuple(size.values()) for size in warm.combinations(sizes)] == [
        (32, 1, 5),
        (32, 1, 7),
        (31, 1, 5),
        (31, 1, 7),
    ]


def test_sizes_that_an_op_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_BACKEND", "reference")
    with pytest.raises(ValueError, match="states: expected a power of the number of bases, 4"):
        warm.warm_one("ctc_crf_loss", "fp32", {**tiny("ctc_crf_loss"), "states": (100,)}, "cpu")
    with pytest.raises(ValueError, match="classes: expected 2 or more"):
        warm.warm_one("ctc_loss", "fp32", {**tiny("ctc_loss"), "classes": (1,)}, "cpu")


def test_the_failure_of_a_worker_is_told() -> None:
    result = warm.warm_in_process("softmax", "fp32", {"rows": (3,), "classes": (5,)}, "nowhere")
    assert result.seconds is None
    assert result.note.startswith("RuntimeError: Expected one of cpu, cuda, ")


def test_the_table_and_the_exit_code(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def fake(op: str, dtype: str, sizes: Any, device: str) -> WarmResult:
        asked.append((op, dtype, sizes, device))
        if op == "logz" and dtype == "fp32":
            return WarmResult(op, dtype, None, note="OutOfMemoryError: too much")
        return WarmResult(op, dtype, 1.25, 7, 2)

    monkeypatch.setattr(warm, "warm_in_process", fake)
    monkeypatch.setenv("COLUMNS", "200")  # each row of the table is one line
    command = ["warm", "softmax", "logz", "softmax", "--jobs", "2", "--classes", "50,60"]
    assert main([*command, "--dtype", "bf16,fp32"]) == 1
    printed = capsys.readouterr().out
    lines = [re.split(r"  +", line) for line in printed.splitlines() if line]
    assert lines[0] == ["Triton's cache"]
    assert lines[1] == ["op", "dtype", "seconds", "kernels compiled", "cached before", "result"]
    assert lines[3:6] == [
        ["softmax", "bf16", "1.2", "7", "2", "ready"],
        ["softmax", "fp32", "1.2", "7", "2", "ready"],
        ["logz", "bf16", "1.2", "7", "2", "ready"],
    ]
    assert lines[6][-2:] == ["FAIL", "OutOfMemoryError: too much"]
    assert "\n3 ready, 1 failed; in /the/cache\n" in printed
    assert {(op, dtype) for op, dtype, *_ in asked} == {
        (op, dtype) for op in ("softmax", "logz") for dtype in ("bf16", "fp32")
    }
    assert all(sizes == {"classes": (50, 60)} for _, _, sizes, _ in asked)
    monkeypatch.setattr(
        warm, "warm_in_process", lambda op, dtype, *_: WarmResult(op, dtype, 0.5, 0, 1)
    )
    assert main(["warm"]) == 0
    assert f"{2 * len(OPS)} ready, 0 failed" in capsys.readouterr().out


def test_only_sizes_of_the_op_reach_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def fake(*arguments: Any) -> WarmResult:
        sent.append(arguments)
        return WarmResult("logz", "fp16", 1.0, 1)

    monkeypatch.setattr(warm, "run_fresh", fake)
    result = warm.warm_in_process("logz", "fp16", {"states": (64,), "classes": (5,)}, "cuda:1")
    assert result == WarmResult("logz", "fp16", 1.0, 1)
    assert sent == [(warm.warm_one, "logz", "fp16", {"states": (64,)}, "cuda:1")]


@pytest.mark.parametrize("cause", ["no GPU", "interpreted", "no triton", "reference"])
def test_without_kernels_there_is_nothing_to_warm(
    cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm, "interpreting", lambda: cause == "interpreted")
    monkeypatch.setattr(warm, "has_triton", lambda: cause != "no triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cause != "no GPU")
    if cause == "reference":
        monkeypatch.setenv("PARTITA_BACKEND", "reference")
        monkeypatch.setattr(warm, "device_named", lambda name: torch.device("cuda", 0))
    assert main(["warm", "softmax", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    expected = {
        "no GPU": "Without one nothing is compiled for it; --device cpu warms the CPU.",
        "interpreted": "TRITON_INTERPRET is set",
        "no triton": "triton is not installed",
        "reference": "cuda:0 is served by PyTorch",
    }
    assert printed.out == ""
    assert expected[cause] in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("cause", ["no numba", "reference", "interpreted"])
def test_a_cpu_without_kernels_has_nothing_to_warm(
    cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if cause == "no numba":
        monkeypatch.setattr(warm, "numba_problem", lambda: "the package numba is not installed")
    else:
        name = "triton" if cause == "interpreted" else "reference"
        monkeypatch.setenv("PARTITA_BACKEND", name)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["warm", "logz", "--device", "cpu"]) == 2
    expected = {
        "no numba": "Nothing is compiled for a CPU: the package numba is not installed",
        "reference": "cpu is served by PyTorch",
        "interpreted": "Triton's interpreter serves the CPU, and compiles nothing.",
    }
    assert expected[cause] in capsys.readouterr().err


def test_a_warm_cache_of_numba_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PARTITA_BACKEND", "auto")
    command = ["warm", "ctc_greedy_search", "--device", "cpu", "--dtype", "fp32"]
    for compiled, cached in (("1", "0"), ("0", "1")):
        assert main(command) == 0
        lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines() if line]
        assert lines[0] == ["Numba's cache"]
        assert lines[3][:2] == ["ctc_greedy_search", "fp32"]
        assert lines[3][3:] == [compiled, cached, "ready"]
    assert list(tmp_path.rglob("*.nbi"))


@pytest.mark.gpu
def test_a_warm_cache_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"rows": (256,), "classes": (1000,)}  # PyTorch serves a softmax of fewer elements
    first, second = (warm.warm_in_process("softmax", "fp32", sizes, "cuda") for _ in range(2))
    assert first.compiled > 0
    assert second.compiled == 0 < second.cached


@triton.jit
def store_one(out):
    tl.store(out, 1.0)


def test_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for a GPU without one here, and then finds the kernel in its cache."""
    if isinstance(store_one, InterpretedFunction):
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = ASTSource(store_one, {"out": "*fp32"})
    with warm._compilations(torch.device("cuda")) as found:
        for _ in range(2):
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert found == [False, True]
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(found) == 2
