"""Programs that serve several numbers of rows, made of two recordings with different numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.replay import Ops, aligned

pytest.importorskip("triton")
from torch import Tensor

from partita.runtime.caches import BoundedCache
from partita.runtime.programs import Draft, RowPrograms, Rows, draft_of_class
from partita.runtime.recording import Recorder

LIMITS = (1, 20, 60)
Op = Callable[..., Any]


class RaggedOps(Ops):
    """Ops whose arguments have the number of rows first."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.grows_evenly = True
        rows = Rows((0, 1), LIMITS, lambda args, limit: self.grows_evenly)
        programs: BoundedCache[bytes, Any] = BoundedCache(100)
        self.by_rows = RowPrograms(f"test.{name}", rows, programs)
        self.programs = programs
        self.replay = self.driver.module.Replay(programs, 0, *self.by_rows.options)

    def record_class(self, op: Op, *args: Any) -> None:
        """Run the op under a recorder and add it to the class of the call."""
        self.kernels = {}
        found = self.by_rows.key_of_class(self.replay, args)
        with Recorder(args) as recorder:
            result = op(*args)
        draft = recorder.draft(result)
        assert draft is not None, recorder.reason
        if found is not None:
            self.by_rows.add(self.driver.module, found, draft)


@pytest.fixture
def ragged(request: pytest.FixtureRequest) -> RaggedOps:
    return RaggedOps(request.node.name)


def sum_of_rows(ops: Ops) -> Op:
    """Return an op with an output and a temporary tensor that grow with the rows."""

    def op(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        temporary, result = torch.zeros(rows + 1, width), torch.empty_like(x)
        total = torch.empty(rows, 3, width)
        total.zero_()
        result.zero_()
        ops.launch(x, temporary, x.numel(), 1.0)
        ops.launch(y, temporary, x.numel(), 1.0)
        ops.launch(temporary, result, x.numel(), 2.0)
        return result, total

    return op


def pair(rows: int, width: int = 5) -> tuple[Tensor, Tensor]:
    return aligned(rows, width), aligned(rows, width)


def test_two_recordings_serve_every_number_of_rows_of_their_class(ragged: RaggedOps) -> None:
    op = sum_of_rows(ragged)
    ragged.record_class(op, *pair(3))
    assert not ragged.programs
    ragged.record_class(op, *pair(7))
    assert len(ragged.programs) == 1
    for rows in (2, 3, 15, 17, 20):
        x, y = pair(rows)
        ragged.driver.log.clear()
        result, total = ragged.replay(x, y)
        torch.testing.assert_close(result, 2 * (x + y))
        assert total.shape == (rows, 3, 5) and total.is_contiguous()
        assert not total.any()
        fills = sorted(entry[2] for entry in ragged.driver.log if entry[0] == "fill")
        assert fills == sorted([5 * (rows + 1), 5 * rows, 15 * rows])


@pytest.mark.parametrize("rows", [1, 16, 21, 32, 61])
def test_other_classes_and_numbers_in_no_class_are_not_served(rows: int, ragged: RaggedOps) -> None:
    for number in (3, 7):
        ragged.record_class(sum_of_rows(ragged), *pair(number))
    assert isinstance(ragged.replay(*pair(rows)), bytes)
    assert isinstance(ragged.replay(*pair(4, 6)), bytes)
    assert isinstance(ragged.replay(aligned(4, 5).double(), aligned(4, 5)), bytes)


def test_each_class_has_its_limits(ragged: RaggedOps) -> None:
    def of(rows: int) -> Any:
        return ragged.replay.class_of(*pair(rows))

    assert of(1) is None and of(61) is None and of(0) is None
    assert of(2) == (of(20)[0], 2, 20) and of(21) == (of(60)[0], 21, 60)
    assert of(16) == (of(16)[0], 16, 20) and of(48) == (of(32)[0], 48, 60)
    assert len({of(rows)[0] for rows in range(2, 61)}) == 4
    assert ragged.replay.class_of(aligned(4, 5), aligned(3, 5)) is None
    assert ragged.replay.class_of(torch.tensor(1.0), aligned(3, 5)) is not None


def test_a_program_of_one_number_of_rows_is_still_found(ragged: RaggedOps) -> None:
    ragged.record(sum_of_rows(ragged), *pair(9))
    x, y = pair(9)
    torch.testing.assert_close(ragged.replay(x, y)[0], 2 * (x + y))
    assert isinstance(ragged.replay(*pair(10)), bytes)


def test_a_class_that_does_not_grow_evenly_has_no_program(ragged: RaggedOps) -> None:
    ragged.grows_evenly = False
    for number in (3, 7):
        ragged.record_class(sum_of_rows(ragged), *pair(number))
    assert not ragged.programs


def uneven_calls(ops: Ops) -> dict[str, Op]:
    """Return ops whose work does not grow evenly with the rows."""

    def launched(x: Tensor, rows: int, factor: float = 1.0) -> Tensor:
        result = torch.zeros_like(x)
        ops.launch(x, result, rows, factor)
        return result

    def two_temporaries(x: Tensor, y: Tensor) -> Tensor:
        first, second = torch.zeros(len(x)), torch.zeros(len(x))
        ops.launch(y, first, 1, 1.0)
        ops.launch(first, second, 1, 1.0)
        return launched(x, 1)

    def more_launches(x: Tensor, y: Tensor) -> Tensor:
        result = launched(x, 1)
        if len(x) > 5:
            ops.launch(y, result, 1, 1.0)
        return result

    return {
        "a parameter that is rounded": lambda x, y: launched(x, len(x) // 3),
        "a number that is no integer": lambda x, y: launched(x, 1, 1 / len(x)),
        "a size that is rounded": lambda x, y: (launched(x, 1), torch.empty(len(x) // 3)),
        "strides": lambda x, y: (launched(x, 1), torch.empty(5, len(x)).t()),
        "a view": lambda x, y: launched(x, 1)[1:],
        "two temporary tensors": two_temporaries,
        "another launch": more_launches,
        "another dtype": lambda x, y: (
            launched(x, 1),
            torch.empty(len(x), dtype=torch.half if len(x) > 5 else torch.float),
        ),
    }


@pytest.mark.parametrize("name", uneven_calls(None))  # type: ignore[arg-type]
def test_recordings_that_differ_otherwise_are_refused(name: str, ragged: RaggedOps) -> None:
    op = uneven_calls(ragged)[name]
    for number in (3, 7):
        ragged.record_class(op, *pair(number))
    assert not ragged.programs
    assert ragged.by_rows.key_of_class(ragged.replay, pair(5)) is None


def test_the_workspace_has_room_for_the_greatest_number_of_rows() -> None:
    def draft(rows: int) -> Draft:
        spec = ((rows, 5), (5, 1), torch.float32, 20 * rows)
        fill = (1, 0, 0, 0, 0, 2 * rows + 1, ((3, 64 - 4 * rows),))
        return Draft(2, (spec,), 0, (512, 8 * rows + 8), 1024, (fill,), ([], [], []))

    found = draft_of_class((3, draft(3)), (7, draft(7)), 100)
    assert found is not None
    grown, growth = found
    assert grown.workspace == 512 + 1024 and grown.temporaries == (512, 32)
    assert grown.outputs == (((None, 5), (5, 1), torch.float32, 2000),)
    assert grown.steps == ((1, 0, 0, 0, 0, 1, ((3, 64),)),)
    assert growth == ((0, 2, (2**64 - 4,)),)
