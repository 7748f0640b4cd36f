"""Integers that reach the GPU as parameters of launches."""

import time
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.rows import kernel_devices

pytest.importorskip("triton")
from partita.runtime import lengths, words
from partita.runtime.lengths import launch_together, on_device


@kernel_devices
@pytest.mark.parametrize("N", [1, 4, 5, 17])
def test_lengths_are_launched_together(N: int, device: str) -> None:
    rows = [torch.arange(N) * 1000 - 1 + i for i in range(3)]
    rows[0][-1] = words.LIMIT
    if device == "cuda":
        wait_for_the_kernel(torch.device(device))
    copies = launch_together(rows, torch.device(device))
    assert copies is not None
    for copy, row in zip(copies, rows, strict=True):
        assert torch.equal(copy.cpu(), row) and copy.is_contiguous() and copy.dtype == torch.int64
        assert copy.data_ptr() % 16 == 0
    rows[1][0] = words.LIMIT + 1
    assert launch_together(rows, torch.device(device)) is None


class Compilation:
    """A future of Triton's, and what becomes of it."""

    def __init__(self) -> None:
        self.future: Future[str] = Future()

    def result(self) -> str:
        return self.future.result()


def test_the_kernel_compiles_aside_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation, device = Compilation(), torch.device("cuda", 0)
    started: list[Any] = []
    monkeypatch.setattr(words, "_compilations", {})
    monkeypatch.setattr(words, "compile_aside", lambda *_, **__: started.append(1) or compilation)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert not words.are_compiled(device) and not words.are_compiled(device)
    compilation.future.set_result("binary")
    assert words.are_compiled(device) and words.are_compiled(device) and started == [1]


def test_a_failure_of_the_compiler_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation, device = Compilation(), torch.device("cuda", 0)
    monkeypatch.setattr(words, "_compilations", {device: compilation})
    compilation.future.set_exception(ValueError("no such instruction"))
    with pytest.raises(ValueError, match="no such instruction"):
        words.are_compiled(device)


@pytest.mark.gpu
def test_lengths_are_copied_while_the_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(words, "_compilations", {device: Compilation()})
    rows = [torch.arange(5), torch.arange(5) + 1]
    for tensor, row in zip(on_device(device, *rows), rows, strict=True):
        assert tensor.is_cuda and torch.equal(tensor.cpu(), row)


def wait_for_the_kernel(device: torch.device) -> None:
    """Wait until lengths are launched."""
    while not words.are_compiled(device):
        time.sleep(0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [9, words.LIMIT + 9])
@pytest.mark.parametrize("N", [0, 3, 16, 33])
def test_lengths_on_a_gpu(N: int, largest: int) -> None:
    """Few small lengths are launched; the others are copied, and one is on the device already."""
    rows = [torch.arange(N), torch.arange(N) + largest, torch.arange(N, device="cuda")]
    launches = 0 < 2 * N <= lengths.LAUNCHED_WORDS and largest < words.LIMIT
    wait_for_the_kernel(torch.device("cuda"))
    with mock.patch.object(lengths, "copy_together", wraps=lengths.copy_together) as copied:
        found = on_device(torch.device("cuda"), *rows)
    assert copied.called is not launches
    for tensor, row in zip(found, rows, strict=True):
        assert tensor.is_cuda and torch.equal(tensor.cpu(), row.cpu())
