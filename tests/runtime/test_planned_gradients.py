"""The launches of a gradient that are planned at the first call of its op are those of its own.

The calls are real, on tensors of the CPU, and no kernel runs.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from helpers.launches import recording
from helpers.rows import INTERPRETING
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import partita
from partita.runtime import first_call, register

pytestmark = pytest.mark.skipif(INTERPRETING, reason="kernels are functions of Python there")

T, N, C = 50, 4, 16
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def compiled_for(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a kernel is compiled for."""
    binder = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    _, specialization, others = binder(*args, **options)
    return kernel.__name__, str(specialization), str(others)


class Calls:
    """The launches of all calls, as a first call plans them and as it makes them."""

    def __init__(self) -> None:
        self.planned: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Stand for `JITFunction.run`."""
        if not first_call.defer(self.launch, kernel, grid[0], args, options, is_compiled=False):
            self.launched.append(compiled_for(kernel, args, options))

    def start_to_compile(self, launch: first_call.Launch) -> None:
        if any(isinstance(arg, Tensor) and arg.is_meta for arg in launch.args):
            self.planned.append(compiled_for(launch.kernel, launch.args, launch.options))

    def launch(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        self.run(kernel, *args, grid=(programs,), warmup=False, **options)


def ctc(labels: int, C: int) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        logits = torch.zeros(T, N, C, requires_grad=True)
        targets = torch.ones(N, labels, dtype=torch.int64)
        lengths = torch.full((N,), T), torch.full((N,), labels)
        return partita.ctc_loss(logits, targets, *lengths, from_logits=True)

    return loss


def chain(T: int) -> Callable[[], Tensor]:
    def logz() -> Tensor:
        source = partita.debruijn_source(4, 2)
        scores, ends = torch.zeros(T, N, *source.shape, requires_grad=True), torch.zeros(N, C)
        return partita.logz(scores, source, ends, ends).sum()

    return logz


def linear_chain(has_transitions: bool) -> Callable[[], Tensor]:
    def logz() -> Tensor:
        emissions = torch.zeros(T, N, C, requires_grad=True)
        transitions = torch.zeros(C, C, requires_grad=has_transitions)
        return partita.linear_chain(emissions, transitions).logz().sum()

    return logz


def semi_markov() -> Tensor:
    scores = (torch.zeros(T, N, C), torch.zeros(C, C), torch.zeros(5, C))
    leaves = [tensor.requires_grad_() for tensor in scores]
    return partita.semi_markov_chain(*leaves).logz().sum()


def ctc_crf() -> Tensor:
    scores = torch.zeros(T, N, C * 5, requires_grad=True)
    targets, lengths = torch.ones(N, 10, dtype=torch.int64), torch.full((N,), 10)
    return partita.ctc_crf_loss(scores, targets, lengths, state_len=2, alphabet_size=5)


@pytest.mark.parametrize(
    "loss",
    [
        ctc(10, 20),
        ctc(40, 20),
        ctc(10, 300),
        ctc(10, 5000),
        chain(T),
        chain(4000),
        linear_chain(True),
        linear_chain(False),
        semi_markov,
        ctc_crf,
    ],
    ids=lambda loss: loss.__qualname__.split(".")[0],
)
def test_planned_launches_are_those_of_the_backward_pass(loss: Callable[[], Tensor]) -> None:
    calls = Calls()

    def eager(op: register.Op, *args: Any) -> Any:
        return first_call.run(op.run, *args, then=op._then)

    with (
        recording([], "13.0"),
        mock.patch.object(JITFunction, "run", lambda kernel, *a, **k: calls.run(kernel, *a, **k)),
        mock.patch.object(register.Op, "eager", eager),
        mock.patch.object(first_call, "_side_by_side", mock.MagicMock()),
        mock.patch.object(first_call, "_start_to_compile", calls.start_to_compile),
    ):
        value = loss()
        forward, calls.launched = calls.launched, []
        value.backward()
    assert forward and calls.planned and set(calls.planned) == set(calls.launched)


CODE = """
import sys, torch, partita

def gradients(name):
    torch.manual_seed(0)
    logits = torch.randn(50, 4, 20, device="cuda", requires_grad=True)
    lengths, labels = torch.full((4,), 50), torch.full((4,), 10)
    targets = torch.randint(1, 20, (4, 10), device="cuda")
    transitions = torch.randn(20, 20, device="cuda", requires_grad=True)
    scores = torch.randn(50, 4, 64, 5, device="cuda", requires_grad=True)
    source = partita.debruijn_source(4, 3).cuda()
    leaves, loss = {
        "ctc": lambda: ([logits], partita.ctc_loss(logits, targets, lengths, labels,
                                                   from_logits=True)),
        "linear_chain": lambda: ([logits, transitions],
                                 partita.linear_chain(logits, transitions).logz().sum()),
        "chain": lambda: ([scores], partita.logz(scores, source).sum()),
        "ctc_crf": lambda: ([scores], partita.ctc_crf_loss(
            scores.flatten(2), targets % 4 + 1, labels, state_len=3, alphabet_size=5)),
    }[name]()
    return [loss] if sys.argv[2] == "forward" else [loss, *torch.autograd.grad(loss, leaves)]

calls = [gradients(sys.argv[1]) for _ in range(1 if sys.argv[2] == "forward" else 4)]
for call in calls[1:]:
    assert all(map(torch.equal, call, calls[0]))
print("done")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("ends_after", ["backward", "forward"])
@pytest.mark.parametrize("name", ["ctc", "linear_chain", "chain", "ctc_crf"])
def test_a_first_call_with_an_empty_cache(name: str, ends_after: str, tmp_path: Path) -> None:
    """First, recorded and replayed calls agree; a process may end while the gradient compiles."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, name, ends_after],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
