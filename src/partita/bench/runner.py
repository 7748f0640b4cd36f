"""Every case to every provider."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .._console import first_line
from .case import Buffers, Case, Settings
from .measure import Machine, Timing
from .providers import OURS, TORCH, Provider


@dataclass(frozen=True)
class Row:
    """One measurement.

    Fields:
        case, provider: of what, and whose.
        part: `inference` (no gradient wanted), `forward`, `backward`, `total`, `replay` (in a CUDA graph), `host`; empty where nothing was timed.
        timing: None where it is refused or wrong.
        error: greatest error against fp64, in ulp, NaN where it is not known.
        extra_memory: peak bytes beyond the inputs, forward and backward; None where not measured.
        note: why it was not timed.
    """

    case: Case
    provider: str
    part: str
    timing: Timing | None
    error: float
    extra_memory: int | None
    note: str

    @property
    def moved(self) -> int | None:
        """The fewest bytes that had to be moved, where the part has a limit."""
        moves = self.case.moves.get(self.part)
        return None if moves is None else moves.bytes

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, of the bytes that had to be moved."""
        return None if self.moved is None or self.timing is None else 1e3 * self.moved / self.timing.median

    def fraction(self, machine: Machine) -> float | None:
        return None if self.bandwidth is None else self.bandwidth / machine.bandwidth(self.case.moves[self.part].limit)


TOLERANCE = 2.0  # a result is wrong when its error is this many times what the contract allows: 2 ulp, or twice that of PyTorch


class DeviceLost(RuntimeError):
    """The GPU no longer answers: what follows would not be measured."""


def run(
    cases: Iterable[Case],
    providers: Sequence[Provider],
    machine: Machine,
    settings: Settings,
    *,
    say: Callable[[str], None],
    done: Callable[[], None],
) -> Iterable[Row]:
    """Rows as they are measured; `say` hears what is being measured, `done` when a case and its provider are through."""
    buffers = Buffers(machine.device)
    for case in cases:
        inputs = case.inputs(buffers)
        own = [error.ulp for error in case.errors(TORCH.ops[case.op](), inputs, TORCH)]
        for provider in takers(case, providers):
            say(f"{case}: {provider.name}")
            yield from _rows(case, inputs, provider, own, machine, settings.repetitions)
            done()


def takers(case: Case, providers: Sequence[Provider]) -> list[Provider]:
    return [provider for provider in providers if case.op in provider.ops and provider.name not in case.without]


def _rows(case: Case, inputs: object, provider: Provider, own: Sequence[float], machine: Machine, repetitions: int) -> list[Row]:
    try:
        function = provider.ops[case.op]()
        errors = list(case.errors(function, inputs, provider))
        worst = max(error.ulp for error in errors)
        for error, torch_error in zip(errors, own, strict=True):
            allowed = TOLERANCE * max(2.0, 2 * torch_error)
            if not error.ulp <= allowed:
                where = f"at {list(error.index)} (got {error.got:.6g}, expected {error.expected:.6g})"
                return [Row(case, provider.name, "", None, worst, None, f"wrong: {error.ulp:.3g} ulp {where}, allowed {allowed:.3g}")]
        times = case.times(function, inputs, provider, machine.device, repetitions)
        memory = case.extra_memory(function, inputs, provider, machine.device)
        return [Row(case, provider.name, part, timing, worst, memory, timing.note) for part, timing in times.items()]
    except Exception as error:
        _require(machine.device, error)
        return [Row(case, provider.name, "", None, float("nan"), None, f"refuses: {first_line(error)[:200]}")]


def _require(device: torch.device, error: Exception) -> None:
    """An illegal access leaves a GPU that fails at everything: then nothing more can be measured in this process."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            raise DeviceLost(first_line(error)) from error


def failed(rows: Iterable[Row]) -> list[Row]:
    """Rows of ours that were not timed."""
    ours = {provider.name for provider in OURS}
    return [row for row in rows if row.provider in ours and row.timing is None]
