"""The memory of a sequence in CTC's second scan: what the first scan saved, and the posteriors."""

from typing import NamedTuple

import triton
import triton.language as tl


class ChunkStates(NamedTuple):
    """The states of a sequence that the first scan saved.

    Fields:
        ptr: states of α, `[num_blocks + 1, N, num_chunks, 2, 32]`; those of β follow.
        block_stride: offset from the states of a block to those of the next block.
        num_blocks: blocks of eight steps in a half.
    """

    ptr: tl.tensor
    block_stride: tl.tensor
    num_blocks: tl.tensor


class ChunkCarries(NamedTuple):
    """The carries that the chunks of a sequence exchange, `[2, num_chunks, N, carry_steps]`.

    Fields:
        saved_ptr: those of the first scan.
        ptr: those of this scan, in the same order.
        chunk_stride: offset from the carries of a chunk to those of the next chunk.
        num_chunks: chunks of all targets.
        carry_steps: steps of a half, and so the number of carries of a chunk.
    """

    saved_ptr: tl.tensor
    ptr: tl.tensor
    chunk_stride: tl.tensor
    num_chunks: tl.tensor
    carry_steps: tl.tensor


class ChunkPosteriors(NamedTuple):
    """The posteriors of a sequence, which this scan writes.

    Fields:
        labels_ptr: `[num_chunks, T, WIDTH]`.
        blanks_ptr: `[num_chunks, T]`.
        T: number of rows of a chunk.
    """

    labels_ptr: tl.tensor
    blanks_ptr: tl.tensor
    T: tl.tensor


class PosteriorMemory(NamedTuple):
    """The memory of a sequence: what the first scan saved, and what this scan writes.

    Fields:
        states: see `ChunkStates`.
        carries: see `ChunkCarries`.
        posteriors: see `ChunkPosteriors`.
    """

    states: tuple[tl.tensor, ...]
    carries: tuple[tl.tensor, ...]
    posteriors: tuple[tl.tensor, ...]


@triton.jit
def sequence_memory(saved_ptr, carries, posteriors, sizes, WIDTH: tl.constexpr):
    """Return the memory of a sequence, given the tensors of the batch and its sizes."""
    n, N, T, num_chunks, num_blocks, carry_steps = sizes
    first_chunk, carry_start, N64 = n * num_chunks, n * carry_steps, N.to(tl.int64)
    saved_carries_ptr, carries_ptr = carries[0] + carry_start, carries[1] + carry_start
    carries = (saved_carries_ptr, carries_ptr, N64 * carry_steps, num_chunks, carry_steps)
    labels_ptr, blanks_ptr = posteriors
    return PosteriorMemory(
        ChunkStates(saved_ptr + first_chunk * 64, (N64 * num_chunks) * 64, num_blocks),
        ChunkCarries(*carries),
        ChunkPosteriors(labels_ptr + first_chunk * T * WIDTH, blanks_ptr + first_chunk * T, T),
    )
