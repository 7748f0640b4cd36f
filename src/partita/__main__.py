"""The command line: `partita info | check | bench`, also as `python -m partita`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

EPILOG = "exit codes: 0 well, 1 a check failed or a result was wrong, 2 wrong arguments; `partita bench --help` has more"


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with an argument."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from . import _check_machine, _info
    from .bench import cli

    parser = _Parser(prog="partita", description="Partition functions for PyTorch.", epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    programs = {
        "info": (_info, "versions, GPUs, and what serves each op"),
        "check": (_check_machine, "every op against fp64 on this machine"),
        "bench": (cli, "time it beside PyTorch and other libraries"),
    }
    for name, (program, summary) in programs.items():
        program.add_arguments(commands.add_parser(name, help=summary))
    args = parser.parse_args(argv)
    return programs[args.command][0].main(args)


if __name__ == "__main__":
    sys.exit(main())
