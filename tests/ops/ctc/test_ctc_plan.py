"""The workspace layout of CTC on a GPU, which needs none."""

import itertools

import pytest
import torch

from partita.ops.ctc.gpu.plan import ctc_plan, saved_shape

SHAPES = [(1, 1, 2), (17, 3, 5), (100, 2, 33), (64, 4, 200), (50, 2, 5000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_parts_of_the_workspace_fit_into_it(shape: tuple[int, int, int]) -> None:
    """Each part starts on 16 bytes, behind the one before and within the declared size."""
    for max_target_len, fp64, from_logits, save in itertools.product(
        (0, 1, 31, 32, 100), (False, True), (False, True), (False, True)
    ):
        plan = ctc_plan(shape, fp64, max_target_len, from_logits, save)
        assert (plan.words,) == saved_shape(shape, max_target_len, save, "gpu")
        (T, N, _), chunks = shape, plan.num_chunks
        elements = {
            "tile_counter": 1,
            "finished": 1,
            "flags": N,
            "carries": 2 * chunks * N * plan.carry_steps,
            "states": 2 * (plan.num_blocks * save + 1) * N * chunks * 2 * 32,
            "logz": N,
            "maxima": T * N,
            "sums": T * N,
            "table": N * (24 + T + 24) * plan.table_width,
        }
        buffer = torch.empty(plan.words, dtype=torch.float64)
        _, zeros, counter, finished, saved, table = plan.workspace(buffer)
        parts = [counter, finished, *saved, table]
        assert (saved.maxima is not None) == (saved.sums is not None) == from_logits
        assert (table is not None) == (plan.table_width > 0)
        assert zeros.data_ptr() == buffer.data_ptr() and zeros.dtype == torch.int64
        end, zeroed = 0, ("tile_counter", "finished", "flags", "carries")[: 3 + (chunks > 1)]
        for (name, number), part in zip(elements.items(), parts, strict=True):
            if part is not None:
                offset = part.data_ptr() - buffer.data_ptr()
                assert offset >= end and offset % 16 == 0 and part.numel() >= number
                end = offset + number * part.itemsize
                assert (end <= 8 * plan.num_zeros) == (name in zeroed)
        assert end <= 8 * plan.words


def test_saved_shapes_of_other_backends() -> None:
    assert saved_shape((7, 2, 5), 3, True, "cpu") == (2, 8, 10)
    assert saved_shape((7, 2, 5), 3, False, "cpu") == (0,)
    assert saved_shape((7, 2, 5), 3, True, "reference") == (0,)
