"""Plans of one-pass divergences: every class belongs to one program of few."""

import pytest

from partita.ops.divergence.gpu.plan import MAX_SPLITS, one_pass_plan


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("classes", [1, 3, 2048, 8192, 8193, 50257, 128_256, 262_144, 2**22])
def test_programs_share_all_classes(classes: int, itemsize: int) -> None:
    for can_exchange in (True, False):
        plan = one_pass_plan(classes, itemsize, can_exchange)
        assert plan is not None
        assert plan.classes_per_program % plan.block == 0 and plan.block >= 2
        assert plan.block & (plan.block - 1) == 0 and 1 <= plan.num_warps <= 4
        assert (plan.splits - 1) * plan.classes_per_program < classes
        assert plan.splits * plan.classes_per_program >= classes
        assert 1 <= plan.splits <= (MAX_SPLITS if can_exchange else 1)


def test_rows_in_fp64_take_two_passes() -> None:
    assert one_pass_plan(1000, 8, True) is None
