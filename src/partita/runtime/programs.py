"""Programs of the C module: what they are made of, and those that serve several numbers of rows.

Where the batches of a model differ in length, an op meets another number of rows at each call, so
no call is equal to an earlier one. Between certain limits, though, the work for rows is the same
but for numbers that grow evenly: sizes of tensors, programs of launches, parameters of kernels. An
op that declares its `Rows` has classes of such calls. Two recordings of a class with different
numbers of rows tell what each number grows by, and their program serves the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .caches import BoundedCache, register_cache

WORKSPACE_ALIGNMENT = 256
ABSOLUTE = -1  # the slot of a value that is no address of an argument, an output or the workspace
LAUNCH, FILL, FORK, LEAVE, JOIN = range(5)  # the kinds of steps, as in programs.c
MAX_CLASSES = 1024


def aligned_size(nbytes: int) -> int:
    """Return the bytes that a temporary tensor takes in the workspace."""
    return -(-nbytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


class Draft(NamedTuple):
    """The parts that a program is made of.

    Fields:
        num_args: the number of arguments of the op.
        outputs: size, stride, dtype and bytes of each tensor that it allocates and returns. In the
            size, None is the number of rows of a class of calls.
        results: the number of an output, or of an output and a view of it, for each result.
        temporaries: the bytes of each tensor in the workspace, in their order there.
        workspace: the bytes of the workspace.
        steps: kind, function, programs, threads, shared memory, words and cells of each step. A
            cell is a slot and an offset; see `programs.c`.
        references: the kernels in the order of their launches, constant tensors, and arguments
            that count by identity, with their memory.
    """

    num_args: int
    outputs: tuple[tuple[Any, ...], ...]
    results: Any
    temporaries: tuple[int, ...]
    workspace: int
    steps: tuple[tuple[Any, ...], ...]
    references: tuple[list[Any], list[Any], list[Any]]

    def program(self, module: Any, growth: Any = None) -> Any:
        """Return the program.

        Args:
            module: the C module.
            growth: what the numbers of each step grow by with each row: programs, words and cells.
                None for a program for one number of rows.
        """
        sizes = self.outputs, self.results, self.workspace
        return module.Program(self.num_args, *sizes, self.steps, self.references, growth)


class Rows(NamedTuple):
    """Which calls of an op differ by their number of rows alone.

    Fields:
        arguments: the positions of the tensors whose first size is the number of rows. There is no
            class for calls where they differ in it.
        limits: increasing numbers of rows. A class has the numbers above one of them and up to the
            next, and either all multiples of 16 or no multiple.
        grows_evenly: a function of the arguments of a call and its class's greatest number of rows.
            It returns whether the GPU function launches the same kernels for all numbers of the
            class, with sizes that are a constant plus a multiple of the number of rows.
    """

    arguments: tuple[int, ...]
    limits: tuple[int, ...]
    grows_evenly: Callable[[tuple[Any, ...], int], bool]


class RowPrograms:
    """The classes of calls of an op.

    Args:
        name: the name of the op.
        rows: its declaration.
        programs: the programs of the op by key.
    """

    def __init__(self, name: str, rows: Rows, programs: BoundedCache[bytes, Any]) -> None:
        self.rows, self.programs = rows, programs
        # Whether the calls of a class grow evenly, and the first recording with its rows.
        self._verdicts: BoundedCache[bytes, bool] = BoundedCache(MAX_CLASSES)
        self._drafts: BoundedCache[bytes, tuple[int, Draft]] = BoundedCache(MAX_CLASSES)
        register_cache(f"runtime.register.{name}.verdicts", self._verdicts.clear)
        register_cache(f"runtime.register.{name}.drafts", self._drafts.clear)

    @property
    def options(self) -> tuple[int, tuple[int, ...]]:
        """The arguments of the C module's `Replay`."""
        return sum(1 << position for position in self.rows.arguments), self.rows.limits

    def key_of_class(self, replay: Any, args: tuple[Any, ...]) -> tuple[bytes, int, int] | None:
        """Return the key of a call's class, its rows and the class's limit; None without class."""
        found: tuple[bytes, int, int] | None = replay.class_of(*args)
        if found is None:
            return None
        key, _, limit = found
        if (verdict := self._verdicts.get(key)) is None:
            verdict = self._verdicts.store(key, self.rows.grows_evenly(args, limit))
        return found if verdict else None

    def add(self, module: Any, found: tuple[bytes, int, int], draft: Draft) -> None:
        """Add the recording of a call to its class; the second one makes the program."""
        key, rows, limit = found
        first_rows, first = self._drafts.get(key) or self._drafts.store(key, (rows, draft))
        if first_rows == rows:
            return
        grown = draft_of_class((first_rows, first), (rows, draft), limit)
        if grown is None:
            self._verdicts.store(key, False)
        else:
            self.programs.store(key, grown[0].program(module, grown[1]))


def draft_of_class(
    first: tuple[int, Draft], second: tuple[int, Draft], limit: int
) -> tuple[Draft, tuple[Any, ...]] | None:
    """Return the draft of a class's program and the growth of its steps, given two recordings.

    Args:
        first, second: recordings with their numbers of rows, which differ.
        limit: the greatest number of rows, for which the workspace has room.

    Returns:
        None where the recordings differ in more than numbers that grow evenly.
    """
    (rows, draft), (other_rows, other) = first, second
    try:
        return _Comparison(rows, other_rows, limit).of_drafts(draft, other)
    except _UnevenError:
        return None


class _UnevenError(Exception):
    """Two recordings of a class differ in more than numbers that grow evenly."""


def _require(condition: bool) -> None:
    if not condition:
        raise _UnevenError


class _Comparison(NamedTuple):
    """A comparison of two recordings by what their numbers grow by with each row.

    Fields:
        rows, other_rows: the numbers of rows of the recordings.
        limit: the greatest number of rows of the class.
    """

    rows: int
    other_rows: int
    limit: int

    def growth(self, number: int, other: int) -> int:
        quotient, rest = divmod(other - number, self.other_rows - self.rows)
        _require(rest == 0)
        return quotient

    def at_limit(self, number: int, other: int) -> int:
        """Return a number as it is for the greatest number of rows."""
        return number + self.growth(number, other) * (self.limit - self.rows)

    def of_drafts(self, a: Draft, b: Draft) -> tuple[Draft, tuple[Any, ...]]:
        for field, other in ((a.outputs, b.outputs), (a.steps, b.steps)):
            _require(len(field) == len(other))
        entries = a.results if isinstance(a.results, list) else [a.results]
        _require(a.results == b.results and not any(isinstance(x, tuple) for x in entries))
        kernels = [[id(kernel) for kernel in draft.references[0]] for draft in (a, b)]
        _require(kernels[0] == kernels[1])
        # What grows in front of another temporary tensor would move that tensor in steps.
        _require(a.temporaries[:-1] == b.temporaries[:-1])
        temporaries = map(self.at_limit, a.temporaries, b.temporaries)
        letters = iter([kernel.description[3] for kernel in a.references[0]])
        steps = [
            self.of_steps(x, y, next(letters) if x[0] == LAUNCH else ())
            for x, y in zip(a.steps, b.steps, strict=True)
        ]
        draft = a._replace(
            outputs=tuple(map(self.of_outputs, a.outputs, b.outputs)),
            workspace=sum(map(aligned_size, temporaries)),
            steps=tuple(step for step, _ in steps),
        )
        return draft, tuple(growth for _, growth in steps)

    def of_outputs(self, a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the output of a class's program, with the greatest number of bytes."""
        (size, *layout, nbytes), (other_size, *other_layout, other_nbytes) = a, b
        _require(layout == other_layout and len(size) == len(other_size))
        rows = self.rows, self.other_rows
        pairs = list(zip(size, other_size, strict=True))
        _require(all(x == y or (x, y) == rows for x, y in pairs))
        at_limit = self.at_limit(nbytes, other_nbytes)
        return tuple(x if x == y else None for x, y in pairs), *layout, at_limit

    def of_steps(self, a: Any, b: Any, parameters: Any) -> tuple[Any, Any]:
        """Return a step with its numbers for no rows, and what they grow by.

        The C module's numbers are unsigned, and their sums are taken modulo their size.
        """
        kind, function, programs, threads, shared, words, cells = a
        _require((kind, function, threads, shared) == (*b[:2], *b[3:5]) and len(cells) == len(b[6]))
        for (_, letter), x, y in zip(parameters, cells, b[6], strict=False):
            _require(letter not in "fd" or x == y)  # the bits of such numbers do not grow
        of_programs, of_words = self.growth(programs, b[2]), self.growth(words, b[5])
        start, of_cells = [], []
        for (slot, value), (other_slot, other) in zip(cells, b[6], strict=True):
            _require(slot == other_slot)
            of_cells.append(self.growth(value, other) % 2**64)
            start.append((slot, (value - of_cells[-1] * self.rows) % 2**64))
        numbers = (programs - of_programs * self.rows) % 2**32, threads, shared
        step = kind, function, *numbers, (words - of_words * self.rows) % 2**64, tuple(start)
        return step, (of_programs % 2**64, of_words % 2**64, tuple(of_cells))
