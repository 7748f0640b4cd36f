"""Plans of one-pass divergences: every class belongs to one program of few."""

import pytest

from partita.ops.divergence.gpu.plan import MIXTURE_WARPS, mixture_plan, one_pass_plan
from partita.primitives.gpu.target import H100, MAX_SPLITS


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("classes", [1, 3, 2048, 8192, 8193, 50257, 128_256, 262_144, 2**22])
def test_programs_share_all_classes(classes: int, itemsize: int) -> None:
    for target in (H100, H100._replace(interpreted=True)):
        plan = one_pass_plan(classes, itemsize, target)
        assert plan is not None
        assert plan.classes_per_program % plan.block == 0 and plan.block >= 2
        assert plan.block & (plan.block - 1) == 0 and 1 <= plan.num_warps <= 4
        assert (plan.splits - 1) * plan.classes_per_program < classes
        assert plan.splits * plan.classes_per_program >= classes
        assert 1 <= plan.splits <= (1 if target.interpreted else MAX_SPLITS)


def test_rows_in_fp64_take_two_passes() -> None:
    assert one_pass_plan(1000, 8, H100) is None


def test_parts_in_registers_cover_all_classes() -> None:
    """All blocks but the last of each program are full, because only that one has a mask."""
    plans = [(classes, mixture_plan(classes)) for classes in range(8, 400_000, 8)]
    for classes, plan in plans:
        if plan is None:
            continue
        block = 32 * MIXTURE_WARPS * 8
        last = classes - (plan.splits - 1) * plan.classes_per_program
        assert plan.classes_per_program % 8 == 0 and plan.splits <= MAX_SPLITS
        assert (plan.blocks - 1) * block < last <= plan.classes_per_program <= plan.blocks * block
    assert all(plan is None for classes, plan in plans if classes <= 8192)
    assert all(plan for classes, plan in plans if 8192 < classes < 390_000)
