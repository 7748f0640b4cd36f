"""The command line: `partita info | check | bench | report | warm`, also as `python -m partita`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

EPILOG = """\
examples:
  partita check                           does it work here?
  partita bench softmax --peers torch     how fast is it?
  partita report report.html              all of it in one file, for a bug report
  partita warm cross_entropy              compile its kernels now

exit codes:
  0  well                1  a check failed or a result was wrong
  2  wrong arguments   130  interrupted
                       141  the reader of the output, such as `head`, ended

`partita COMMAND --help` has more."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from .bench import cli as bench
    from .bench import report_cli as report
    from .cli import check, info, warm
    from .cli.console import UsageError

    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="partita",
        description="Partition functions for PyTorch.",
        epilog=EPILOG,
        formatter_class=formatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    programs = {
        "info": (info, "versions, GPUs, and what serves each op"),
        "check": (check, "the ops against fp64 on this machine"),
        "bench": (bench, "the time of each op, of PyTorch and of other libraries"),
        "report": (report, "all of these in one HTML file"),
        "warm": (warm, "compile kernels before the first call"),
    }
    for name, (program, summary) in programs.items():
        program.add_arguments(commands.add_parser(name, help=summary, formatter_class=formatter))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = programs[args.command][0].main(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"partita {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"partita {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes at its end, where the error could not be caught.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
