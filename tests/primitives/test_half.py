"""Half types on the CPU: kernels read and write their words, so no copy in fp32 exists."""

import os

import numpy as np
import pytest
import torch
from helpers.fresh import run_fresh

pytest.importorskip("numba")
from partita.primitives.cpu.batch import as_steps
from partita.primitives.cpu.half import load_row, store_row


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 3])
def test_every_word_is_read_and_written_as_pytorch_does(dtype: torch.dtype, stride: int) -> None:
    numbers = all_numbers(dtype)
    memory = as_steps(numbers.repeat_interleave(stride)[::stride])
    row = np.empty(len(numbers), np.float32)
    load_row(memory, 0, stride, row)
    expected = numbers.float()
    torch.testing.assert_close(torch.from_numpy(row), expected, rtol=0, atol=0, equal_nan=True)
    beside = torch.stack([expected, expected.nextafter(torch.tensor(torch.inf))]).flatten()
    halfway = (expected[1:].double() + expected[:-1].double()).float() / 2
    rounded = torch.cat([beside, -beside, halfway, torch.randn(10_000) * 1e-6])
    result = torch.zeros(len(rounded) * stride, dtype=dtype)[::stride]
    store_row(as_steps(result), 0, stride, rounded.double().numpy())
    torch.testing.assert_close(result, rounded.to(dtype), rtol=0, atol=0, equal_nan=True)


# Each takes scores of 48 MB in a half type where it takes T steps.
CALLS = {
    "ctc_loss": (300, "partita.ctc_loss(x(T, 8, 10_000), ones(8, 5), full(8, T), full(8, 5))"),
    "rnnt_loss": (60, "partita.rnnt_loss(x(4, T, 10, 10_000), ones(4, 9), full(4, T), full(4, 9))"),
    "tdt_loss": (
        60,
        "partita.tdt_loss(x(4, T, 10, 10_000), x(4, T, 10, 2), ones(4, 9), full(4, T), full(4, 9),"
        " 0, [0, 1])",
    ),
    "chain": (
        1000,
        "partita.Chain(x(T, 6, 8, 500), (torch.arange(500) % 8).repeat(8, 1)).logz().sum()",
    ),
}
MEMORY = """
import torch, partita
torch.set_num_threads(2)
def full(size, value):
    return torch.full((size,), value, dtype=torch.int32)
def ones(*shape):
    return torch.ones(shape, dtype=torch.int32)
def x(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
def peak():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
def loss(T):
    return {call}
loss(5).backward()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
loss({T}).backward()
print(peak() - before)
"""


@pytest.mark.parametrize("name", list(CALLS))
def test_losses_of_half_types_take_no_copy_in_fp32(name: str) -> None:
    """The peak is the scores and their gradient, 96 MB; one of them in fp32 would add 96 MB."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux")
    T, call = CALLS[name]
    found = run_fresh(MEMORY.format(T=T, call=call))
    assert found.code == 0, found.stderr
    assert float(found.stdout) < 150
