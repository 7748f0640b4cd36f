"""`partita.backend` and `PARTITA_BACKEND`: the backend that serves a call, without fallbacks."""

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers.errors import raises
from helpers.rows import INTERPRETING, devices, leaf

import partita
from partita.runtime import backend as _backend
from partita.testing import sample_rows

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTITA_BACKEND", raising=False)
    monkeypatch.setattr(_backend, "_default", None)  # a test's default ends with the test


def test_blocks_nest_and_end_with_an_exception_too() -> None:
    assert _backend.current_backend() == "auto"
    with partita.backend("reference"):
        with pytest.raises(KeyError), partita.backend("triton"):
            assert _backend.current_backend() == "triton"
            raise KeyError
        assert _backend.current_backend() == "reference"
    assert _backend.current_backend() == "auto"


def test_it_decorates_a_function() -> None:
    @partita.backend("reference")
    def served() -> str:
        return _backend.current_backend()

    assert (served(), served()) == ("reference", "reference")


def test_the_variable_is_read_at_each_call_and_yields_to_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARTITA_BACKEND", "numba")
    with raises("RuntimeError: backend 'numba': this op has no Numba kernel"):
        partita.softmax(sample_rows(2, 3))
    with partita.backend("reference"):
        partita.softmax(sample_rows(2, 3))
    monkeypatch.setenv("PARTITA_BACKEND", "")
    partita.softmax(sample_rows(2, 3))


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "expected one of auto, reference, triton, numba"
    with raises(f"ValueError: backend: {expected}, got 'cuda'$"), partita.backend("cuda"):
        pass
    monkeypatch.setenv("PARTITA_BACKEND", "Triton")
    with raises(f"ValueError: PARTITA_BACKEND: {expected}, got 'Triton'$"):
        partita.softmax(sample_rows(2, 3))


def in_another_thread() -> str:
    """Return the backend that a new thread sees."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(_backend.current_backend()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_block_holds_in_its_own_thread() -> None:
    with partita.backend("reference"):
        assert (_backend.current_backend(), in_another_thread()) == ("reference", "auto")


def test_a_plain_call_outside_of_blocks_sets_the_default_of_all_threads() -> None:
    partita.backend("reference")
    try:
        assert (_backend.current_backend(), in_another_thread()) == ("reference", "reference")
        with partita.backend("numba"):
            partita.backend("triton")  # inside of a block a plain call does nothing
            assert (_backend.current_backend(), in_another_thread()) == ("numba", "reference")
        assert _backend.current_backend() == "reference"
    finally:
        partita.backend("auto")
    assert in_another_thread() == "auto"


@pytest.mark.parametrize(
    ("name", "device", "numba", "table"),
    [
        ("auto", CPU, False, "reference"),
        ("auto", CPU, True, "cpu"),
        ("auto", GPU, False, "gpu"),
        ("auto", GPU, True, "gpu"),
        ("auto", torch.device("meta"), True, "reference"),
        ("reference", CPU, True, "reference"),
        ("reference", GPU, True, "reference"),
        ("triton", GPU, True, "gpu"),
        ("numba", CPU, True, "cpu"),
    ],
    ids=str,
)
def test_the_table_that_serves(
    name: str, device: torch.device, numba: bool, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backend, "has_triton", lambda: True)
    monkeypatch.setattr(_backend, "numba_problem", lambda: None)
    assert _backend.resolve(name, device, has_cpu=numba) == table


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_the_reference_serves_without_the_packages(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backend, "has_triton", lambda: False)
    monkeypatch.setattr(_backend, "numba_problem", lambda: "not here")
    assert _backend.resolve("auto", device, has_cpu=True) == "reference"
    with raises("RuntimeError: backend 'triton': the package triton is not installed$"):
        _backend.resolve("triton", device, has_cpu=True)
    with raises(f"RuntimeError: backend 'numba': {'not here$' if device == CPU else ''}"):
        _backend.resolve("numba", device, has_cpu=True)


BROKEN = """open({log!r}, "a").write("imported ")
raise ImportError("Numba needs NumPy 2.3 or less. Got NumPy 9.0.\\nMore lines.")
"""


def test_an_installed_numba_that_is_broken(tmp_path: Path) -> None:
    """The ops fall back with one warning at the caller's line, and `info` tells why."""
    log, package = tmp_path / "log", tmp_path / "numba"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN.format(log=str(log)))
    script = tmp_path / "user.py"
    script.write_text(
        "import torch, partita\n"
        "chain = partita.Chain(torch.zeros(3, 1, 2, 2), partita.dense_source(2))\n"
        "print(chain.logz())  # the line of the warning\n"
        "chain.viterbi()\n"
        "from partita.__main__ import main\n"
        "main(['info'])\n"
        "partita.backend('numba')\n"
        "chain.logz()\n"
    )
    source = str(Path(partita.__file__).parents[1])
    path = os.pathsep.join((str(tmp_path), source))
    environment = {**os.environ, "PYTHONPATH": path, "PARTITA_BACKEND": "", "COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment
    )
    problem = "cannot be imported: ImportError: Numba needs NumPy 2.3 or less. Got NumPy 9.0."
    assert "tensor([2.7726])" in done.stdout
    assert done.stderr.count("RuntimeWarning") == 1
    assert f"{script}:3: RuntimeWarning: partita: chains, CTC" in done.stderr
    assert done.stderr.strip().endswith(
        f"RuntimeError: backend 'numba': the package numba {problem}"
    )
    assert problem in done.stdout
    assert log.read_text() == "imported "


@pytest.mark.skipif(INTERPRETING, reason="the interpreter serves the CPU")
@pytest.mark.skipif(
    "triton" not in sys.modules and not _backend.has_triton(), reason="needs triton"
)
def test_triton_refuses_the_cpu_without_its_interpreter() -> None:
    error = "RuntimeError: backend 'triton': expected tensors on a GPU .* got cpu$"
    loss = functools.partial(partita.cross_entropy, target=torch.tensor([0, 1]))
    for call in (partita.softmax, partita.logsumexp, loss):
        with partita.backend("triton"), raises(error):
            call(sample_rows(2, 3))


@devices
def test_backward_runs_on_the_backend_of_its_forward(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(2, 3, device=device)
    target = torch.tensor([0, 1], device=device)
    with partita.backend("reference"):
        loss = (
            partita.softmax(x)[0, 0]
            + partita.logsumexp(x).sum()
            + partita.cross_entropy(x, target)
            + partita.token_stats(x, target).entropy.sum()
        )
    monkeypatch.setenv("PARTITA_BACKEND", "numba")
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.gpu
def test_reference_on_the_gpu_agrees_with_the_kernels() -> None:
    x = sample_rows(64, 781, device="cuda")
    with partita.backend("reference"):
        expected = partita.softmax(x)
    torch.testing.assert_close(partita.softmax(x), expected)


def test_meta_tensors() -> None:
    x = torch.empty(4, 7, device="meta", requires_grad=True)
    target = torch.empty(4, device="meta", dtype=torch.int64)
    loss = (
        partita.cross_entropy(x, target)
        + partita.token_stats(x, target).entropy.sum()
        + partita.softmax(x).sum()
    )
    loss.backward()
    assert (loss.shape, x.grad.shape) == ((), (4, 7))


def test_dynamo_traces_the_choice_of_a_table() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if _backend.resolve("auto", GPU, has_cpu=False) == "gpu" else x

    expected = 1.0 if _backend.has_triton() else 0.0
    assert chosen(torch.zeros(())) == expected
