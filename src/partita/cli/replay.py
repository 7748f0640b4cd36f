"""`partita info --replay`: whether each call of the catalogue is replayed, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..runtime import launcher
from ..runtime.register import REPLAYED, watch
from ..testing.samples import CALLS, Call, Draw
from .console import Progress, Table, first_line, print_table

ROUNDS = 5  # The second or third of equal calls is recorded, in forward and backward pass.


class Line(NamedTuple):
    """A line of the table."""

    call: str  # its name in the catalogue
    replayed: str  # `yes`, `no`, or `partly` where some of its ops are
    reason: str  # why not, with the name of each op that is not replayed


def line_of(call: str, ops: Iterable[tuple[str, str]]) -> Line:
    """Return the line of a call from its ops and how each was served, as `watch` tells it."""
    ops = list(dict.fromkeys(ops))
    if not ops:
        return Line(call, "no", "PyTorch's own functions serve it")
    reasons = [f"{op}: {served}" for op, served in ops if served != REPLAYED]
    if not reasons:
        return Line(call, "yes", "")
    return Line(call, "partly" if len(reasons) < len(ops) else "no", "; ".join(reasons))


def run(call: Call, device: str = "cuda") -> Line:
    """Make equal calls, forward and backward, and return how the last one was served."""
    try:
        sample = call.sample(Draw(device=device))
        for _ in range(ROUNDS):
            with watch() as ops:
                sample.gradients(sample.run())
    except Exception as error:
        return Line(call.name, "no", first_line(error))
    return line_of(call.name, ops)


def run_all() -> list[Line]:
    lines = []
    with Progress(len(CALLS)) as progress:
        for call in CALLS.values():
            progress.say(call.name)
            lines.append(run(call))
            progress.advance()
    return lines


def show() -> None:
    """Print the table of all calls, or why nothing is replayed here."""
    if launcher.module() is None:
        print(f"Nothing is replayed: {launcher.status()}.")
        return
    lines = run_all()
    print_table(*Table("Replayed", ["call", "replayed", ""], lines, left=2))
    print(f"\n{sum(line.replayed == 'yes' for line in lines)} of {len(lines)} calls are replayed.")
