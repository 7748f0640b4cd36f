"""The line that tells of a long compilation: where it is printed, and where not."""

import io
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from partita.runtime import waiting
from partita.runtime.waiting import compiling

KERNELS = "partita.ops.ctc.cpu"
LINE = "partita: Numba compiles the kernels of ctc, "


class Stream(io.StringIO):
    """An error stream that tells when something was written to it."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal, self.written = is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def flush(self) -> None:
        self.written.set()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    stream = Stream(True)
    # Pytest itself sets sys.stderr between the fixtures and the test.
    monkeypatch.setattr(waiting, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setattr(waiting, "SECONDS", 0.0)
    monkeypatch.delenv(waiting.VARIABLE, raising=False)
    waiting._told.clear()
    waiting._spent.clear()
    yield stream
    waiting._told.clear()
    waiting._spent.clear()


def test_a_terminal_shows_one_line_for_each_family(terminal: Stream) -> None:
    for family in ("ctc", "rnnt", "ctc"):
        terminal.written.clear()
        with compiling("Numba", f"partita.ops.{family}.cpu"):
            if family not in waiting._told:
                assert terminal.written.wait(60)
    lines = terminal.getvalue().replace("\r\x1b[K", "").splitlines()
    assert [line.partition(", ")[0] for line in lines] == [
        f"partita: Numba compiles the kernels of {family}" for family in ("ctc", "rnnt")
    ]
    assert "`python -m partita warm`" in lines[0]


def test_a_captured_stream_gets_the_line_on_request_alone(
    terminal: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.is_terminal = False
    with compiling("Numba", KERNELS):
        assert not any(isinstance(each, threading.Timer) for each in threading.enumerate())
    assert terminal.getvalue() == ""
    monkeypatch.setenv(waiting.VARIABLE, "1")
    with compiling("Numba", KERNELS):
        assert terminal.written.wait(60)
    assert terminal.getvalue().startswith(LINE)
    monkeypatch.setattr(waiting.sys, "stderr", None)  # as under pythonw
    with compiling("Numba", "partita.ops.rnnt.cpu"):
        pass


def test_a_short_compilation_is_silent_and_leaves_no_thread(
    terminal: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SECONDS", 3600.0)
    with compiling("Numba", KERNELS), compiling("Numba", KERNELS):
        timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
        assert len(timers) == 1  # a compilation inside of another has none
    timers[0].join(60)
    assert not timers[0].is_alive()
    assert terminal.getvalue() == ""
    assert 0.0 <= waiting._spent["ctc"] < 3600.0


def test_short_compilations_of_a_family_add_up(
    terminal: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SECONDS", 3600.0)
    waiting._spent["ctc"] = 3600.0
    with compiling("Numba", KERNELS):
        assert terminal.written.wait(60)


def test_numba_tells(terminal: Stream) -> None:
    jit = pytest.importorskip("partita.primitives.cpu.jit")

    class Slow(jit.AnnouncedCompiler):
        def _compile_bytecode(self):
            assert terminal.written.wait(60)
            return super()._compile_bytecode()

    def double(x):
        return 2 * x

    double.__module__ = KERNELS
    compiled = jit.njit(**{**jit.FLAGS, "pipeline_class": Slow})(double)
    assert compiled(3) == 6
    assert LINE in terminal.getvalue()
