"""The bits of results: those of this machine are the kept ones, and how they are compared."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from helpers.digests import COMMAND, computed, path_of
from torch import Tensor

from partita.__main__ import main
from partita.cli import digest
from partita.cli.console import DTYPES
from partita.testing.samples import CALLS, Call

CPU = torch.device("cpu")


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_bits_are_the_kept_ones(device: str, dtype: str) -> None:
    here = torch.empty(0, device=device).device
    machine = digest.machine(here)
    path = path_of(machine)
    if not path.exists():
        pytest.skip(f"no digests are kept of {machine}: {COMMAND}")
    kept = digest.read(path)[1]
    # The tests of a GPU change settings of this process, so fresh ones compute.
    found = computed(here, 1 if device == "cpu" else min(4, os.cpu_count() or 1), [dtype])
    assert found.keys() & kept.keys(), "the samples have other names"
    changed = "\n".join(digest.changes(found, kept))
    assert not changed, f"{changed}\nIf these bits are meant to be others: {COMMAND}"


def test_hashes_are_of_bits() -> None:
    x = torch.tensor([0.0, 1.0, torch.nan])
    other_nan = torch.tensor([0, 0x3F800000, 0x7FC01234], dtype=torch.int32).view(torch.float32)
    assert other_nan.isnan().tolist() == [False, False, True]
    assert not torch.equal(x.view(torch.int32), other_nan.view(torch.int32))
    assert digest.hash_of([x]) == digest.hash_of([other_nan])
    strided = torch.stack([x, x], 1)[:, 0]
    assert digest.hash_of([x]) == digest.hash_of([strided])
    ulp_above = torch.nextafter(x[1], x[1] + 1)
    others = (-x, x.double(), x[None], x[:2], x.roll(1), torch.stack([x[0], ulp_above, x[2]]))
    hashes = {digest.hash_of([other]) for other in (x, *others)}
    assert len(hashes) == 1 + len(others)
    assert digest.hash_of([x[:1], x]) != digest.hash_of([x, x[:1]])
    assert digest.hash_of([torch.empty(0)]) != digest.hash_of([])


def test_the_numbers_are_the_same_on_every_machine() -> None:
    """The last bits of PyTorch's normal numbers depend on the logarithm of the C library."""
    numbers = digest._PortableDraw(torch.float64).normal(10, 10)
    assert digest.hash_of([numbers]) == "6bf738bd6b72"
    labels = digest._PortableDraw().labels(0, 1000, 100)
    assert digest.hash_of([labels]) == "218a19b6e3fd"


def softmax_with(function: object) -> dict[str, Call]:
    return {"softmax": dataclasses.replace(CALLS["softmax"], function=function, options={})}


def test_the_command_prints_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def softmax(input: Tensor, dim: int) -> Tensor:
        return torch.softmax(input, dim)

    def with_other_gradients(input: Tensor, dim: int) -> Tensor:
        found = torch.softmax(input, dim)
        return found + (0 * input if input.dtype == torch.float32 else input - input.detach())

    command = ["check", "--device", "cpu", "--digest"]
    threads = torch.get_num_threads()
    monkeypatch.setattr(digest, "CALLS", softmax_with(softmax))
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"# {digest.machine(CPU)}\n")
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)) and any(", small, bf16" in line for line in lines)
    file = tmp_path / "there.txt"
    file.write_text(printed)
    assert main([*command, str(file)]) == 0
    assert (
        f"{len(lines)} equal, 0 differ, 0 only here, 0 only in the file" in capsys.readouterr().out
    )
    monkeypatch.setattr(digest, "CALLS", softmax_with(with_other_gradients))
    assert main([*command, str(file)]) == 1
    compared = capsys.readouterr().out
    assert "softmax, small, fp64: other gradients\n" in compared
    assert "fp32: other" not in compared and "other results" not in compared
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("content", [None, "", "# a machine\n", "# a machine\nhello\n", b"\xff"])
def test_a_file_that_holds_no_digests(
    content: str | bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "there.txt"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["check", "--digest", str(file), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("partita check: --digest: ") and str(file) in error
    assert error.count("\n") == 1
