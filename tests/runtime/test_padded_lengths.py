"""Lengths of padded targets from the C module, with a driver of host memory."""

import ctypes
import struct
from typing import Any

import pytest
import torch
from helpers.eager import Served
from helpers.replay import Ops, aligned
from torch import Tensor

import partita
from partita.runtime import lengths
from partita.runtime.recording import Recorder


def store_words_kernel(programs: int, words: int, start: int, *bits: int) -> None:
    """Store 16 numbers, which come as fp32, from a position on."""
    numbers = [int(struct.unpack("<f", struct.pack("<I", value))[0]) for value in bits]
    (ctypes.c_int64 * 16).from_address(words + 8 * start)[:] = numbers


@pytest.fixture
def sender(ops: Ops) -> Any:
    kinds = ((0, "p"), (1, "i"), *((i, "f") for i in range(2, 18)))
    return ops.driver.kernel(store_words_kernel, *kinds)


def targets(N: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(N, 7, dtype=dtype)


@pytest.mark.parametrize("make", [lambda x: x, Tensor.tolist, lambda x: tuple(x.tolist())])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("N", [1, 4, 5, 16, 20])
def test_lengths_on_the_host_are_sent(N: int, rows: int, make: Any, sender: Any, ops: Ops) -> None:
    given = [torch.arange(N) * 1000 - 1 + i for i in range(rows)]
    given[0][-1] = 2**24
    call = ops.driver.module.padded_lengths
    found = call(sender, targets(N, torch.int32), *map(make, given))
    assert found[:3] == (N, 7, max(min(int(given[-1].max()), 7), 0))
    for got, row in zip(found[3:], given, strict=True):
        assert torch.equal(got, row) and got.is_contiguous() and got.data_ptr() % 16 == 0
    sent = [entry for entry in ops.driver.log if entry[0] == "launch"]
    assert len(sent) == -(-rows * (N + N % 2) // 16)


def test_lengths_on_the_device_are_as_they_are(ops: Ops) -> None:
    steps, labels = torch.tensor([9, 8]), torch.tensor([3, 2])
    found = ops.driver.module.padded_lengths(None, targets(2), steps, labels)
    assert found[:3] == (2, 7, 7) and found[3] is steps and found[4] is labels
    assert not ops.driver.log


class Subclass(torch.Tensor):
    pass


ROW = torch.tensor([3, 2])


@pytest.mark.parametrize(
    ("labels", "rows"),
    [
        (targets(3), (ROW,)),
        (targets(2)[:, ::2], (ROW,)),
        (targets(2).T, (ROW,)),
        (targets(2, torch.int16), (ROW,)),
        (targets(2).double(), (ROW,)),
        (targets(2)[0], (ROW,)),
        (targets(0), (ROW[:0],)),
        (targets(2).as_subclass(Subclass), (ROW,)),
        (torch.zeros(2, 7, dtype=torch.int64, device="meta"), (ROW,)),
        ([[1, 2], [3, 4]], (ROW,)),
        (targets(2), (ROW, ROW.int())),
        (targets(2), (ROW.double(),)),
        (targets(2), (torch.zeros(4, dtype=torch.int64)[::2],)),
        (targets(2), (ROW[None],)),
        (targets(2), (ROW.as_subclass(Subclass),)),
        (targets(2), (torch.tensor([2, 2**24 + 1]),)),
        (targets(2), ([2, -(2**24) - 1],)),
        (targets(2), ([2, 2**80],)),
        (targets(2), ([2, True],)),
        (targets(2), ([2, 3.0],)),
        (targets(2), ([1, 2, 3],)),
        (targets(2), (3,)),
        (targets(2), (None,)),
        (targets(2), ()),
        (targets(2), (ROW,) * 5),
        (targets(40), (torch.ones(40).long(),) * 2),
    ],
)
def test_other_lengths_are_left_to_python(labels: Any, rows: Any, sender: Any, ops: Ops) -> None:
    call = ops.driver.module.padded_lengths
    assert call(sender, labels, *rows) is NotImplemented
    if not isinstance(rows, tuple) or any(isinstance(row, list) for row in rows):
        assert call(None, labels, *rows) is NotImplemented
    assert not ops.driver.log


def test_modes_and_other_devices_are_left_to_python(sender: Any, ops: Ops) -> None:
    call = ops.driver.module.padded_lengths
    with Recorder((ROW,)):
        assert call(sender, targets(2), ROW) is NotImplemented
    found: list[Any] = []
    torch.func.vmap(lambda x: found.append(call(sender, targets(2), ROW)) or x)(torch.ones(2))
    assert found == [NotImplemented]
    ops.driver.current = 1
    assert call(sender, targets(2), ROW) is NotImplemented
    assert call(None, targets(2), ROW) is NotImplemented


def test_an_error_of_the_driver_is_raised(sender: Any, ops: Ops) -> None:
    ops.driver.status = 701
    with pytest.raises(RuntimeError, match="out of resources"):
        ops.driver.module.padded_lengths(sender, targets(2), ROW)


def test_losses_take_lengths_of_each_form(
    served: Served, sender: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = aligned(6, 2, 4), torch.tensor([[1, 2, 2], [3, 1, 0]])
    forms = ((torch.tensor([6, 5]), torch.tensor([2, 1])), ([6, 5], (2, 1)))
    expected = partita.ctc_loss(logits, labels, *forms[0], from_logits=True)
    monkeypatch.setitem(lengths._senders, None, sender)  # by the index of the CPU
    served.driver.log.clear()
    for steps, sizes in forms[1:] * 2:
        assert torch.equal(
            partita.ctc_loss(logits, labels, steps, sizes, from_logits=True), expected
        )
        aligned_words = partita.ctc_align(logits, labels, steps, sizes, from_logits=True)
        assert aligned_words.longest == 3
    assert ("launch", "store_words_kernel", 1, 128, 16, None) in served.driver.log
