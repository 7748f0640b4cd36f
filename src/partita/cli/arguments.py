"""Parsers of the arguments that several commands take: lists of names, numbers and dtypes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from .console import DTYPES, UsageError


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> tuple[int, ...]:
    result = tuple(int(word) if word.isdecimal() else 0 for word in words(text))
    if not all(result):
        raise argparse.ArgumentTypeError(f"expected positive whole numbers, got {text!r}")
    return result


def number(text: str) -> int:
    result = numbers(text)
    if len(result) != 1:
        raise argparse.ArgumentTypeError(f"expected one positive whole number, got {text!r}")
    return result[0]


def dtype_names(text: str) -> tuple[str, ...]:
    for name in words(text):
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(DTYPES)}, got {name!r}")
    return tuple(dict.fromkeys(words(text)))


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    return tuple(DTYPES[name] for name in dtype_names(text))


def device_named(name: str) -> torch.device:
    """Return the device of this name, with its index.

    Raises:
        UsageError: the device cannot be used.
    """
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device: cannot use {name!r}: expected cpu, cuda or cuda:1")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        message = str(error).splitlines()[0]
        raise UsageError(f"--device: cannot use {name!r}: {message}") from None


def require_writable(path: Path) -> None:
    """Make the folder of a file, and check before the work begins that the file can be written.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; expected a file to write")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        kind = "file" if path.exists() else "folder"
        raise UsageError(f"{path}: cannot be written: no right to write to the {kind}")
