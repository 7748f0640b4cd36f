"""Batches of transducers as arrays: lengths, and rows of logits at any strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.jit import jit
from ....runtime.register import resolved


class Batch(NamedTuple):
    """The targets and the lengths of a batch.

    Fields:
        targets: `[B, U]` int64.
        steps, labels: the lengths, `[B]` int64; 0 for an invalid sequence.
        invalid: whether a label or a length is out of range, `[B]`.
        blank: the class of the blank.
        T: the steps of the nodes.
    """

    targets: Any
    steps: Any
    labels: Any
    invalid: Any
    blank: int
    T: int


class Rows(NamedTuple):
    """The entries of all nodes, at any strides in memory.

    Fields:
        numbers: the memory from the first to the last number, one-dimensional.
        strides: the strides of sequences, steps, positions and classes, `[4]`.
        size: the number of classes.
    """

    numbers: Any
    strides: Any
    size: int


@jit
def find_invalid(
    targets: Any, logit_lengths: Any, target_lengths: Any, T: int, V: int, blank: int, invalid: Any
) -> None:
    """Write whether each sequence has a label or a length that is out of range."""
    for b in range(len(invalid)):
        length = target_lengths[b]
        valid = 0 <= logit_lengths[b] <= T and 0 <= length <= targets.shape[1]
        if valid:
            for u in range(length):
                label = targets[b, u]
                valid = valid and 0 <= label < V and label != blank
        invalid[b] = not valid


def as_batch(
    targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, T: int, V: int, blank: int
) -> Batch:
    """Return the arguments of an op as arrays."""
    labels = resolved(targets).long().contiguous().numpy()
    lengths = [resolved(each).contiguous().numpy() for each in (logit_lengths, target_lengths)]
    invalid = np.empty(len(labels), np.bool_)
    find_invalid(labels, *lengths, T, V, blank, invalid)
    steps, sizes = (np.where(invalid, 0, each) for each in lengths)
    return Batch(labels, steps, sizes, invalid, blank, T)


def as_rows(tensor: Tensor) -> Rows:
    """Return `[B, T, U1, X]` of any strides in its own memory; half types become fp32."""
    numbers = resolved(tensor.detach())
    numbers = numbers.float() if numbers.element_size() == 2 else numbers
    strides, size = np.array(numbers.stride()), numbers.shape[3]
    if numbers.is_contiguous():
        return Rows(numbers.numpy().reshape(-1), strides, size)
    extent = 0
    if numbers.numel():
        sizes = zip(numbers.shape, numbers.stride(), strict=True)
        extent = 1 + sum((length - 1) * stride for length, stride in sizes)
    return Rows(numbers.as_strided((extent,), (1,)).numpy(), strides, size)


@jit
def memory_of(rows: Any, b: int, t: int, u: int) -> Any:
    """Return the memory from the first entry of a node on."""
    return rows.numbers[b * rows.strides[0] + t * rows.strides[1] + u * rows.strides[2] :]


@jit
def node_row(rows: Any, b: int, t: int, u: int, buffer: Any) -> Any:
    """Return the entries of a node, contiguous: a view, or a copy in the buffer."""
    memory, stride = memory_of(rows, b, t, u), rows.strides[3]
    if stride == 1:
        return memory[: rows.size]
    for c in range(rows.size):
        buffer[c] = memory[c * stride]
    return buffer


@jit
def store_row(rows: Any, b: int, t: int, u: int, values: Any) -> None:
    """Write the entries of a node."""
    memory, stride = memory_of(rows, b, t, u), rows.strides[3]
    if stride == 1:
        part = memory[: len(values)]
        for c in range(len(values)):
            part[c] = values[c]
    else:
        for c in range(len(values)):
            memory[c * stride] = values[c]


def nodes_of_steps(batch: Batch) -> Any:
    """Return the nodes within the lengths of each step of each sequence, `[B * T]`."""
    inside = np.arange(batch.T) < batch.steps[:, None]
    return np.where(inside, batch.labels[:, None] + 1, 0).reshape(-1)


def empty_nodes(shape: torch.Size, kinds: int) -> Any:
    """Return fp64 memory for numbers of the nodes, `[kinds, B, T, U1]`."""
    return np.empty((kinds, *shape[:3]))
