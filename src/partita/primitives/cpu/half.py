"""Numbers of half types on the CPU: Numba has none there, so kernels read and write their words.

A tensor of a half type is read in its own memory, row by row, so no copy of it in fp32 exists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import jit

NO_NUMBERS, NO_WORDS = np.empty(0, np.float32), np.empty(0, np.uint16)


@jit
def from_bf16(word: Any) -> Any:
    """Return the number of a word in fp32."""
    return np.uint32(np.uint32(word) << 16).view(np.float32)


@jit
def from_fp16(word: Any) -> Any:
    """Return the number of a word in fp32."""
    # The exponent has 3 bits less than in fp32, and its bias is 112 less.
    bits = np.uint32(word)
    size = np.uint32((bits & 0x7FFF) << 13).view(np.float32) * np.float32(2.0**112)
    not_finite = 0x7F800000 if bits & 0x7C00 == 0x7C00 else 0
    bits = np.float32(size).view(np.uint32) | not_finite | (bits & 0x8000) << 16
    return np.uint32(bits).view(np.float32)


@jit
def to_bf16(number: Any) -> Any:
    """Return the word of a number, rounded to the nearest as PyTorch does."""
    bits = np.float32(number).view(np.uint32)
    word = np.uint32(bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.uint16(word if number == number else 0x7FFF)


@jit
def to_fp16(number: Any) -> Any:
    """Return the word of a number, rounded to the nearest as PyTorch does."""
    bits = np.float32(number).view(np.uint32)
    size = np.int32(bits & 0x7FFFFFFF)
    # Beside 0.5, fp32 has the digits of a subnormal number of fp16.
    subnormal = np.float32(np.abs(np.float32(number)) + np.float32(0.5)).view(np.int32)
    word: Any = np.int32(size - (112 << 23) + 0xFFF + (size >> 13 & 1)) >> 13
    word = subnormal - 0x3F000000 if size < 0x38800000 else word
    word = min(word, 0x7C00) if number == number else 0x7FFF
    return np.uint16(bits >> 16 & 0x8000 | word)


@jit
def number_at(memory: Any, i: int) -> Any:
    """Return a number of `Steps`."""
    if not len(memory.words):
        return memory.numbers[i]
    return from_bf16(memory.words[i]) if memory.is_bf16 else from_fp16(memory.words[i])


@jit
def load_row(memory: Any, first: int, stride: int, row: Any) -> None:
    """Copy numbers of `Steps` to a row."""
    words, numbers = memory.words[first:], memory.numbers[first:]
    if stride != 1:
        for c in range(len(row)):
            row[c] = number_at(memory, first + c * stride)
    elif not len(words):
        for c in range(len(row)):
            row[c] = numbers[c]
    elif memory.is_bf16:
        for c in range(len(row)):
            row[c] = from_bf16(words[c])
    else:
        for c in range(len(row)):
            row[c] = from_fp16(words[c])


@jit
def store_row(memory: Any, first: int, stride: int, row: Any) -> None:
    """Write a row into `Steps`."""
    words, numbers = memory.words[first:], memory.numbers[first:]
    if not len(words) and stride == 1:  # The loop becomes vector code.
        for c in range(len(row)):
            numbers[c] = row[c]
    elif not len(words):
        for c in range(len(row)):
            numbers[c * stride] = row[c]
    elif memory.is_bf16:
        for c in range(len(row)):
            words[c * stride] = to_bf16(row[c])
    else:
        for c in range(len(row)):
            words[c * stride] = to_fp16(row[c])
