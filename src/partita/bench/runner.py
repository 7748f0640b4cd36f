"""The run of all cases with all providers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cli.console import Progress, first_line
from .case import Attempt, Buffers, Case, Provider, is_ours
from .measure import Machine, Timing


@dataclass(frozen=True)
class Row:
    """One measurement."""

    case: Case
    provider: str
    # `inference` (without gradients), `forward`, `backward`, `total`, `replay` (in a CUDA graph) or
    # `do_bench`; empty where nothing was timed
    part: str
    timing: Timing | None  # None where the provider refused or was wrong
    error: float  # the greatest against fp64, in the unit of the case; NaN where not known
    extra_memory: int | None  # peak bytes beyond the inputs; None where not measured
    note: str  # why the case was not timed

    @property
    def moved(self) -> int | None:
        """Return the fewest bytes that had to be moved, or None for a part without a limit."""
        moves = self.case.moves.get(self.part)
        return None if moves is None else moves.bytes

    @property
    def bandwidth(self) -> float | None:
        """Return the bytes that had to be moved, per second."""
        if self.moved is None or self.timing is None:
            return None
        return 1e3 * self.moved / self.timing.median

    def fraction(self, machine: Machine) -> float | None:
        """Return the share of the bandwidth; None on a CPU, whose caches hold these inputs."""
        if self.bandwidth is None or machine.device.type == "cpu":
            return None
        return self.bandwidth / machine.bandwidth(self.case.moves[self.part].limit)


class DeviceLost(RuntimeError):
    """The GPU no longer answers, so that nothing more can be measured."""


def run(
    cases: Iterable[Case],
    providers: Sequence[Provider],
    machine: Machine,
    repetitions: int,
    progress: Progress,
) -> Iterator[list[Row]]:
    """Yield the rows of each provider of each case as they are measured."""
    buffers = Buffers(machine.device)
    for case in cases:
        inputs = case.inputs(buffers)
        standard = case.standard(inputs)
        for provider in takers(case, providers):
            progress.say(f"{case}: {provider.name}")
            yield _rows(case, inputs, provider, standard, machine, repetitions)


def takers(case: Case, providers: Sequence[Provider]) -> list[Provider]:
    return [
        provider
        for provider in providers
        if case.op in provider.ops and provider.name not in case.without
    ]


def _rows(
    case: Case, inputs: Any, provider: Provider, standard: Any, machine: Machine, repetitions: int
) -> list[Row]:
    try:
        if reason := provider.refusal(case.op, inputs):
            return [_untimed(case, provider, f"refuses: {reason}")]
        function = provider.ops[case.op]()
        attempt = Attempt(function, inputs, provider)
        worst, wrong = judge(case, attempt, standard)
        if wrong:
            return [_untimed(case, provider, wrong, worst)]
        times = case.times(attempt, machine.device, repetitions)
        memory = case.extra_memory(attempt, machine.device)
        return [
            Row(case, provider.name, part, timing, worst, memory, "")
            for part, timing in times.items()
        ]
    except Exception as error:
        require_device(machine.device, error)
        return [_untimed(case, provider, f"refuses: {first_line(error)[:200]}")]


def _untimed(case: Case, provider: Provider, note: str, error: float = math.nan) -> Row:
    return Row(case, provider.name, "", None, error, None, note)


def judge(case: Case, attempt: Attempt, standard: Any) -> tuple[float, str]:
    """Return the worst error, and what is wrong; the latter is empty where nothing is."""
    verdicts = list(case.verdicts(attempt, standard))
    worst = max((verdict.error for verdict in verdicts), default=math.nan)
    for found in verdicts:
        if found.failed:
            amount = f"{found.error:.3g} {case.unit}".rstrip()
            values = f"(got {found.got:.6g}, expected {found.expected:.6g})"
            where = f"at {list(found.index)} {values}, allowed {found.allowed:.3g}"
            return worst, f"wrong: {amount} {where}"
    return worst, ""


def finish(work: Iterable[object], progress: Progress) -> tuple[str, int]:
    """Do all steps of the work; return the problem that ended it early, and the exit code."""
    try:
        for _ in work:
            progress.advance()
    except KeyboardInterrupt:
        return "interrupted", 130
    except DeviceLost as error:
        return f"the GPU no longer answers after {error}", 1
    except Exception as error:  # such as too little memory for the inputs of a case
        return f"broke off: {first_line(error)}", 1
    return "", 0


def require_device(device: torch.device, error: Exception) -> None:
    """Raise where an illegal access has left a GPU on which nothing works any more."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            raise DeviceLost(first_line(error)) from error


def failed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of Partita that were not timed."""
    return [row for row in rows if is_ours(row.provider) and row.timing is None]
