"""Plans of one-pass divergences: every class belongs to one program of few."""

import pytest

from partita.ops.divergence.gpu.plan import MAX_BLOCKS, MAX_LONE_BLOCKS, MAX_SPLITS, one_pass_plan


@pytest.mark.parametrize("is_mixture", [False, True])
@pytest.mark.parametrize("vector", [1, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("classes", [1, 3, 2048, 8192, 8193, 50257, 128_256, 262_144, 2**22])
def test_programs_share_all_classes(
    classes: int, itemsize: int, vector: int, is_mixture: bool
) -> None:
    max_blocks = MAX_BLOCKS if vector > 1 else MAX_LONE_BLOCKS
    for can_exchange in (True, False):
        plan = one_pass_plan(classes, itemsize, vector, can_exchange, is_mixture)
        if plan is None:
            assert is_mixture and classes * itemsize > 4096 * max_blocks * (
                64 if can_exchange else 1
            )
            continue
        assert plan.classes_per_program == plan.blocks * plan.block and plan.block >= 2
        assert plan.block & (plan.block - 1) == 0 and 1 <= plan.num_warps <= 4
        assert (plan.splits - 1) * plan.classes_per_program < classes
        assert plan.splits * plan.classes_per_program >= classes
        assert 1 <= plan.splits <= (MAX_SPLITS if can_exchange else 1)
        assert not is_mixture or plan.blocks <= max_blocks


def test_rows_in_fp64_take_two_passes() -> None:
    assert one_pass_plan(1000, 8, 2, True, False) is None
