"""The workspace layout of CTC on a GPU, which needs none."""

import itertools

import pytest

from partita.ops.ctc.gpu.plan import ctc_plan, saved_shape, workspace_sizes

SHAPES = [(1, 1, 2), (17, 3, 5), (100, 2, 33), (64, 4, 200), (50, 2, 5000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_parts_of_the_workspace_fill_it(shape: tuple[int, int, int]) -> None:
    """Each part starts on 16 bytes, and all parts together have the size that the fake declares."""
    for max_target_len, fp64, from_logits, save in itertools.product(
        (0, 1, 31, 32, 100), (False, True), (False, True), (False, True)
    ):
        plan = ctc_plan(shape, fp64, max_target_len)
        sizes = workspace_sizes(shape, plan, from_logits, save)
        assert (sum(sizes),) == saved_shape(shape, max_target_len, from_logits, save, "gpu")
        assert sizes.unused >= 0 and all(size % 2 == 0 for size in sizes[:-1])


def test_saved_shapes_of_other_backends() -> None:
    assert saved_shape((7, 2, 5), 3, True, True, "cpu") == (2, 8, 10)
    assert saved_shape((7, 2, 5), 3, True, False, "cpu") == (0,)
    assert saved_shape((7, 2, 5), 3, True, True, "reference") == (0,)
    assert saved_shape((0, 2, 5), 3, True, True, "gpu") == (0,)
