"""Calls on a GPU beside what else a process does: the same bits, and nothing is left behind."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.eager import disconnect
from helpers.fresh import SOURCE, run_fresh
from helpers.gpu_calls import assert_same, gradients, labels, numbers, poison

pytest.importorskip("triton")
import triton
import triton.language as tl
from torch import Tensor

import partita
from partita.runtime import launcher, private_names
from partita.runtime.caches import clear_caches

pytestmark = pytest.mark.gpu
Calls = dict[str, Callable[[], list[Tensor]]]
WARM = 4  # calls after which a call and its backward pass are replayed
TRAINING = ("cross_entropy", "token_stats", "ctc_loss")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the first call of the test load the C module anew, and the next test's too."""
    disconnect(monkeypatch)
    clear_caches()
    yield monkeypatch
    monkeypatch.undo()
    clear_caches()
    assert launcher.module() is not None


def warm(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Return the results of a call that is replayed from now on."""
    for _ in range(WARM):
        results = call()
    return results


def memory() -> int:
    """Return the bytes of tensors on the GPU."""
    gc.collect()
    return torch.cuda.memory_allocated()


def assert_nothing_is_left(before: int) -> None:
    """Assert that no more memory is in use, once a thread of autograd has freed what it had."""
    end = time.monotonic() + 10
    while memory() > before:
        assert time.monotonic() < end, f"{memory() - before} bytes are left"
        time.sleep(0.001)


@pytest.mark.parametrize("moved", ["build_c_module", "load_binary"])
def test_triton_launches_where_its_internals_have_moved(
    moved: str, calls: Calls, unloaded: pytest.MonkeyPatch
) -> None:
    names = ("softmax", "cross_entropy", "ctc_loss", "logz")
    expected = {name: calls[name]() for name in names}

    def build_c_module(*_: Any) -> None:
        raise AttributeError("compile_module_from_src")

    changed = {"build_c_module": build_c_module, "load_binary": lambda *_: None}
    unloaded.setattr(private_names, moved, changed[moved])
    clear_caches()
    disconnect(unloaded)
    for name in names:
        for _ in range(WARM):
            poison()
            assert_same(calls[name](), expected[name])
    assert (launcher.module() is None) == (moved == "build_c_module")
    if launcher.module() is None:
        assert "failed (AttributeError: compile_module_from_src)" in launcher.status()


@pytest.mark.parametrize("name", [*TRAINING, "logz"])
def test_a_replay_allocates_from_the_user_s_pool(name: str, calls: Calls) -> None:
    expected = warm(calls[name])
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        found = [calls[name]() for _ in range(3)]
    segments = [(part["address"], part["total_size"]) for part in pool.snapshot()]
    for results in found:  # The backward pass has its own thread, which has no part in the pool.
        address = results[0].data_ptr()
        assert any(start <= address < start + size for start, size in segments)
    poison()
    for results in (*found, calls[name]()):
        assert_same(results, expected)


@triton.jit
def double_kernel(source, result, size, BLOCK: tl.constexpr):
    """Write twice the source into the result: a kernel of the user."""
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < size
    tl.store(result + positions, 2 * tl.load(source + positions, inside), inside)


def double(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 256),)](x, result, x.numel(), BLOCK=256)
    return result


class Head(torch.autograd.Function):
    """A function of the user, who launches kernels before, between and after ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            logits = double(x.detach()).requires_grad_()
            loss = partita.cross_entropy(logits, targets)
        ctx.save_for_backward(double(torch.autograd.grad(loss, logits)[0]))
        return double(loss.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return double(ctx.saved_tensors[0]) * grads[0], None


def test_kernels_of_the_user_run_between_ours() -> None:
    """Products with two are exact."""
    x, targets = numbers(8, 1000), labels(0, 1000, 8)
    expected = warm(lambda: gradients(lambda x: 2 * partita.cross_entropy(2 * x, targets), x))
    for _ in range(WARM):
        poison()
        assert_same(gradients(lambda x: Head.apply(x, targets), x), expected)
        shares = partita.softmax(double(x))
        assert torch.equal(double(shares), 2 * partita.softmax(2 * x))


FORKS = """
import os, sys, traceback
import torch
import partita

torch.set_num_threads(1)  # Threads of the parent do not live in a fork.
logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
targets = torch.arange(8)
expected = partita.cross_entropy(logits, targets)

def in_a_fork(work):
    if not (process := os.fork()):
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

def on_the_gpu():
    x, labels = logits.cuda(), targets.cuda()
    found = [partita.cross_entropy(x, labels).item() for _ in range(4)]
    os.environ["PARTITA_REPLAY"] = "0"
    assert set(found) == {partita.cross_entropy(x, labels).item()}
    del os.environ["PARTITA_REPLAY"]

def on_the_cpu():
    assert torch.equal(partita.cross_entropy(logits, targets), expected)

in_a_fork(on_the_gpu)
on_the_gpu()
in_a_fork(on_the_cpu)
on_the_gpu()
"""


def test_forks_before_and_after_the_first_call_on_a_gpu() -> None:
    done = run_fresh(FORKS, {**os.environ, "PYTHONPATH": str(SOURCE)})
    assert done.code == 0, done.stderr


@pytest.mark.parametrize("replay", ["0", "1"])
def test_a_gpu_that_is_full_for_one_call(replay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_REPLAY", replay)
    x, targets = numbers(1024, 16384), labels(0, 16384, 1024)

    def call() -> list[Tensor]:
        return gradients(lambda x: partita.cross_entropy(x, targets), x)

    expected = warm(call)
    before = memory()
    torch.cuda.empty_cache()
    allowed = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = []
    try:
        # What is reserved may have room for the call, so tensors of its size take that room first.
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty_like(x))
        with pytest.raises(torch.OutOfMemoryError):
            call()  # whose gradient takes 64 MB
    finally:
        torch.cuda.set_per_process_memory_fraction(allowed)
        held.clear()
    assert_nothing_is_left(before)
    assert_same(call(), expected)


@pytest.mark.parametrize("name", TRAINING)
def test_ten_thousand_calls_leave_nothing(name: str, calls: Calls) -> None:
    expected = warm(calls[name])
    found = calls[name]()
    before, blocks = memory(), sys.getallocatedblocks()
    for _ in range(10_000):
        found = calls[name]()
    assert_nothing_is_left(before)
    assert sys.getallocatedblocks() - blocks < 5_000  # A block for each call would be 10,000.
    assert_same(found, expected)
