"""Calls with any number of rows have the programs that recordings of their own would have."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from helpers.compilation import TARGETS, compiled
from helpers.launches import Launch
from torch import Tensor

from partita.ops.cross_entropy.gpu import launch as loss_launch
from partita.ops.cross_entropy.gpu import scale
from partita.ops.cross_entropy.rows import LOSS_ROWS, SCALED_ROWS
from partita.primitives.gpu import row_plan
from partita.runtime import recording
from partita.runtime.programs import Draft, Rows, draft_of_class
from partita.runtime.recording import Recorder

OPTIONS: dict[str, tuple[Any, ...]] = {
    "mean": (None, None, -100, 0.0, 0.0, 0.0, True),
    "sum": (None, None, 3, 0.0, 0.0, 0.0, False),
    "all": ("weight", None, -100, 0.1, 30.0, 1e-3, True),
    "denominator": (None, "denominator", -100, 0.0, 0.0, 0.0, False),
}


class Kernel:
    """A kernel as Triton specializes it for the arguments of a launch."""

    def __init__(self, number: int, parameters: tuple[tuple[int, str], ...]) -> None:
        self.description = (number, 128, 0, parameters)


class Launches:
    """Stands in for `launch`: tells the recorder what would be launched."""

    def __init__(self) -> None:
        self.kernels: dict[Any, Kernel] = {}

    def __call__(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        if not programs:
            return
        kinds = tuple(map(self.kind, args))
        letters = {"tensor": "p", "int": "i", "float": "d"}
        parameters = tuple(
            (i, letters[kind[0]]) for i, kind in enumerate(kinds) if kind[0] in letters
        )
        key = (kernel, kinds, tuple(options.items()))
        bound = self.kernels.setdefault(key, Kernel(len(self.kernels), parameters))
        active = recording.recorder()
        assert active is not None
        active.launch(bound, programs, args)

    @staticmethod
    def kind(arg: Any) -> tuple[Any, ...]:
        """Return what Triton compiles a kernel for."""
        if isinstance(arg, Tensor):
            return "tensor", arg.dtype, arg.data_ptr() % 16 == 0
        if isinstance(arg, float):
            return ("float",)
        if arg is None or arg == 1:
            return "constant", arg
        return "int", arg % 16 == 0, -(2**31) <= arg < 2**31


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Launches()
    monkeypatch.setattr(loss_launch, "launch", stub)
    monkeypatch.setattr(scale, "launch", stub)
    monkeypatch.setattr(row_plan, "INTERPRETED", False)
    row_plan.row_plan.cache_clear()


def classes_of(rows: Rows) -> list[tuple[list[int], int]]:
    """Return the numbers of rows of each class, and its limit."""
    found = []
    for below, limit in zip(rows.limits, rows.limits[1:], strict=False):
        for multiples in (True, False):
            numbers = [n for n in range(below + 1, limit + 1) if (n % 16 == 0) == multiples]
            found.append((numbers, limit))
    return found


def at(program: tuple[Draft, Any], rows: int) -> Any:
    """Return the sizes and the steps of a class's program for a number of rows."""
    draft, growth = program
    sizes = [tuple(rows if n is None else n for n in output[0]) for output in draft.outputs]
    steps = []
    for step, (of_programs, of_words, of_cells) in zip(draft.steps, growth, strict=True):
        kind, function, programs, threads, shared, words, cells = step
        programs = (programs + of_programs * rows) % 2**32
        words = (words + of_words * rows) % 2**64
        values = [
            (slot, (value + more * rows) % 2**64)
            for (slot, value), more in zip(cells, of_cells, strict=True)
        ]
        steps.append((kind, function, programs, threads, shared, words, tuple(values)))
    return sizes, tuple(steps)


def check_classes(rows: Rows, run: Any, args_of: Any) -> int:
    """Check the program of each class against recordings, and return how many classes have one."""

    def draft(number: int) -> Draft:
        args = args_of(number)
        with Recorder(args) as recorder:
            result = run(*args)
        found = recorder.draft(result)
        assert found is not None, recorder.reason
        return found

    served = 0
    for numbers, limit in classes_of(rows):
        verdicts = {rows.grows_evenly(args_of(n), limit) for n in (numbers[0], numbers[-1])}
        assert len(verdicts) == 1
        if not verdicts.pop():
            continue
        served += 1
        for first, second in ((0, 1), (len(numbers) // 2, -1), (-1, 2)):
            pair = numbers[first], numbers[second]
            program = draft_of_class((pair[0], draft(pair[0])), (pair[1], draft(pair[1])), limit)
            assert program is not None
            step = max(1, len(numbers) // 9)
            for number in (*numbers[:3], *numbers[3:-1:step], numbers[-1]):
                exact = draft(number)
                sizes, steps = at(program, number)
                assert sizes == [output[0] for output in exact.outputs]
                # Steps are those of the recording, except for where the workspace has room.
                assert steps == exact.steps
                assert program[0].workspace >= exact.workspace
                assert program[0].results == exact.results
                for output, other in zip(program[0].outputs, exact.outputs, strict=True):
                    assert output[1:3] == other[1:3] and output[3] >= other[3]
    return served


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 257, 1000, 1024, 2050, 4096, 9001, 33000])
def test_losses_of_all_rows_of_a_class(
    width: int, dtype: torch.dtype, options: str, launched: None
) -> None:
    memory = torch.empty(1024 * width, dtype=dtype)
    tensors = {"weight": torch.ones(width), "denominator": torch.ones([])}

    def args_of(rows: int) -> tuple[Any, ...]:
        logits = memory[: rows * width].view(rows, width)
        target = torch.zeros(rows, dtype=torch.int64)
        chosen = [tensors.get(x, x) if isinstance(x, str) else x for x in OPTIONS[options]]
        return (logits, target, *chosen, dtype)

    served = check_classes(LOSS_ROWS, loss_launch.cross_entropy_one_pass, args_of)
    if options != "denominator" and width in (1000, 1024, 2050) and dtype == torch.float32:
        assert served == 4


@pytest.mark.parametrize("width", [1, 5, 1000, 1024, 4096, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scalings_of_all_rows_of_a_class(width: int, dtype: torch.dtype, launched: None) -> None:
    memory, factor = torch.empty(1024 * width, dtype=dtype), torch.ones([])

    def args_of(rows: int) -> tuple[Any, ...]:
        return memory[: rows * width].view(rows, width), factor

    assert check_classes(SCALED_ROWS, scale.scale_, args_of) == (2 if width <= 4096 else 0)


@pytest.mark.parametrize("shape", [(1, 37), (37, 1), (1, 1), (16, 48), (3, 5)])
def test_the_scaling_compiles_for_sizes_that_are_constants(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Launch] = []

    def note(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        found.append(Launch(kernel, args, options))

    monkeypatch.setattr(scale, "launch", note)
    scale.scale_(torch.ones(shape), torch.ones([]))
    (launch,) = found
    assert "cubin" in compiled(launch, TARGETS["sm_90"].target).asm


def test_calls_of_which_no_program_serves_all_rows() -> None:
    usual = (None, None, -100, 0.0, 0.0, 0.0, True, torch.float32)

    def grows(logits: Tensor, target: Tensor, args: tuple[Any, ...] = usual) -> bool:
        return LOSS_ROWS.grows_evenly((logits, target, *args), 128)

    x = torch.randn(4, 1000)
    assert grows(x, torch.zeros(4, dtype=torch.int64))
    assert not grows(x, torch.softmax(x, 1))
    assert not grows(torch.randn(4, 1000, 2), torch.zeros(4, 2, dtype=torch.int64))
    assert not grows(torch.randn(1000, 4).t(), torch.zeros(4, dtype=torch.int64))
    assert not SCALED_ROWS.grows_evenly((torch.randn(5, 4).t(), torch.ones([])), 1024)
    assert not SCALED_ROWS.grows_evenly((torch.randn(4, 0), torch.ones([])), 1024)
