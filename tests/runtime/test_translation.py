"""The translation of kernels from Python, one after another and ahead of their compilation."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
from helpers.compilation import TARGETS, compiled
from helpers.launches import Launch, recording
from helpers.rows import INTERPRETING
from triton.compiler import CompilationError
from triton.compiler.code_generator import CodeGenerator

import partita
from partita.runtime import first_call, launcher, translation, triton_key

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from compare_ptx import canonical

TARGET = TARGETS["sm_90"].target
needs_compiler = pytest.mark.skipif(INTERPRETING, reason="kernels are functions of Python there")


class Options:
    """Stands for the options of a compilation."""

    def hash(self) -> str:
        return ""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return a launch in Triton and one in Gluon, on a GPU of the target's capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found: list[Launch] = []
    with recording(found, "13.0"):
        logits = torch.zeros(3, 2, 5, requires_grad=True)
        targets, ones = torch.ones(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
        partita.ctc_loss(logits, targets, ones, ones, from_logits=True)
    kinds = {launch.kernel.is_gluon(): launch for launch in reversed(found)}
    return [kinds[False], kinds[True]]


def instructions(launch: Launch, wrap: Callable[[type], type] = translation.in_turn) -> str:
    return canonical(compiled(launch, TARGET, wrap).asm["ptx"])


def test_sources_are_translated_one_after_another() -> None:
    active: list[int] = []

    class Source:
        def hash(self) -> str:
            return ""

        def make_ir(self, target: str, options: Options, number: int) -> int:
            active.append(number)
            time.sleep(0.01)
            assert active == [number]
            active.remove(number)
            if number == 3:
                raise ValueError("syntax")
            return number

    turns = translation.in_turn(Source)
    assert translation.in_turn(turns) is turns and translation.in_turn(Source) is turns
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(turns().make_ir, "", Options(), number) for number in range(6)]
    found = [future.result() for future in futures if not future.exception()]
    assert found == [0, 1, 2, 4, 5]


def test_waiting_threads_take_turns_in_the_order_of_their_numbers() -> None:
    turns, order = translation.Turns(), list[int]()

    def wait(number: int) -> None:
        with turns.turn(number):
            order.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in (4, 2, 5, 3)]
    with turns.turn(9):
        for thread in threads:
            thread.start()
        while len(turns._waiting) < len(threads):
            time.sleep(0.001)
    for thread in threads:
        thread.join(60)
    assert order == [2, 3, 4, 5] and not turns.is_taken


def test_a_turn_ends_with_an_error() -> None:
    turns = translation.Turns()
    with pytest.raises(ValueError, match="syntax"), turns.turn(0):
        raise ValueError("syntax")
    with turns.turn(1):
        assert turns.is_taken


@needs_compiler
def test_a_translated_kernel_is_not_translated_again(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    visited: list[Any] = []
    visit = translation._visit
    monkeypatch.setattr(translation, "_visit", lambda *args: visited.append(args) or visit(*args))
    for launch in launches:
        plain = instructions(launch, lambda source: source)
        assert not visited
        translation.translate_ahead(launch.kernel, launch.args, launch.options)
        assert visited and len(translation._translated) == 1
        visited.clear()
        assert instructions(launch) == plain
        assert not visited and not translation._translated
        assert instructions(launch) == plain
        assert visited
        visited.clear()


@needs_compiler
def test_other_options_are_translated_again(launches: list[Launch]) -> None:
    kernel, args, options = launches[0][:3]
    translation.translate_ahead(kernel, args, {**options, "num_stages": 5})
    ((target, source, _),) = translation._translated
    instructions(launches[0])
    assert [key[:2] for key in translation._translated] == [(target, source)]
    translation._translated.clear()


@triton.jit
def wrong_kernel(x_ptr):
    return undefined(x_ptr)  # noqa: F821


@needs_compiler
def test_errors_name_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    usual = CodeGenerator.visit
    with pytest.raises(CompilationError, match="undefined is not defined") as caught:
        translation.translate_ahead(wrong_kernel, (torch.zeros(1),), {})
    assert "return undefined(x_ptr)" in str(caught.value)
    assert CodeGenerator.visit is usual and not translation._turns.is_taken


@needs_compiler
@pytest.mark.parametrize("reason", ["unknown version", "debugging"])
def test_triton_translates_as_usual(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "debugging":
        monkeypatch.setattr(triton.knobs.compilation, "front_end_debugging", True)
    else:
        monkeypatch.setattr(launcher, "is_known_triton", lambda: False)
    usual = CodeGenerator.visit
    with translation._plain_visits():
        assert CodeGenerator.visit is usual


def test_kernels_are_translated_while_a_new_key_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key: Future[None] = Future()
    loading = launcher._Loading(Future(), (key,))
    monkeypatch.setattr(launcher, "_loading", loading)
    monkeypatch.setattr(triton_key, "is_new", threading.Event())
    ahead: list[str] = []

    def note(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        ahead.append(kernel)
        if kernel == "second":
            key.set_result(None)
            raise ValueError("left to the compilation")

    monkeypatch.setattr(first_call, "translate_ahead", note)
    monkeypatch.setattr(first_call, "_start_to_compile", lambda launch: launch.kernel)
    works = [first_call.Launch(name, 1, (), {}) for name in ("first", "second", "third")]
    assert first_call._start_all([], works) == ["first", "second", "third"]
    assert not ahead  # a stored key would do
    triton_key.is_new.set()
    assert first_call._start_all(works[:1], works[1:]) == ["second", "third"]
    assert ahead == ["first", "second"]
