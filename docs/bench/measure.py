"""Measure all tables of this folder that one GPU can measure, in one run.

    python docs/bench/measure.py --out /tmp/tables
    python docs/bench/measure.py --out /tmp/tables --only chain ctc rnnt --seconds 530
    python docs/bench/measure.py --dry-run

First, commands that fill the caches run side by side on all cores: kernels and graphs of
`torch.compile` are compiled on the CPU. Then the parts are measured one after another, each by a
process of its own, in the order of `--only`. A part that runs out of time, or breaks off, leaves
its old table and says so; what it had measured is in the folder `partial`, and what it printed is
in `logs`.

Not measured here: parallel.csv needs several GPUs, cpu.csv and text_search.csv are measured on a
CPU by the scripts of their names, and chain_exactness.csv comes from examples/chain_exactness.py.

After a run, copy the tables into this folder and run figures.py and quoted.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from measure_parts import BENCH, NAMES, PARTS, Part

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# `partita bench` has this exit code too where it ended early; then one of these says so.
MEASURED_WITH_FAILURES = 1
BENCH_SAYS = "partita bench: "
ENDED_EARLY = ("broke off", "no longer answers", "interrupted")
SECONDS_TO_STOP = 10  # from the interrupt of a part to its end
LEAST_SECONDS = 10  # a part with less time left is not started


def environment(cache: Path) -> dict[str, str]:
    """Return the variables of all processes, which share their caches.

    The compiler gets one thread in each process, as there are as many processes as cores.
    """
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    folders = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUPY_CACHE_DIR": "cupy",
        "QUACK_CACHE_DIR": "quack",
    }
    return {
        **os.environ,
        "PYTHONPATH": path,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **{name: str(cache / folder) for name, folder in folders.items()},
    }


def arguments_of(command: str, table: Path) -> list[str]:
    return [
        sys.executable,
        *(word.format(table=table, out=table.parent) for word in shlex.split(command)),
    ]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process, so that it writes what it has, and end it and its children.

    Children that outlive it, such as compilers, would slow what is measured next.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def fill_caches(
    parts: Sequence[Part], out: Path, env: dict[str, str], limit: float, at_once: int, gib: int
) -> None:
    """Run the warm-ups side by side until the limit, the longest part first.

    Those at work take `gib` of the GPU's memory at most, but one always works.
    """
    start = time.monotonic()
    longest_first = sorted(parts, key=lambda part: -part.limit)
    waiting = [
        (f"{part.name}-{i}", command, part.gib)
        for part in longest_first
        for i, command in enumerate(part.warm_up)
    ]
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    taken: dict[str, int] = {}
    while (waiting or running) and time.monotonic() - start < limit:
        for each in list(waiting):
            name, command, needs = each
            if len(running) == at_once or (running and needs + sum(taken.values()) > gib):
                continue
            waiting.remove(each)
            taken[name] = needs
            with (out / "logs" / f"warm-up-{name}.txt").open("wb") as log:
                words = arguments_of(command, out / "warm-up.csv")
                process = subprocess.Popen(
                    words, env=env, stdout=log, stderr=log, start_new_session=True
                )
            running[name] = process, time.monotonic()
        for name, (process, since) in list(running.items()):
            if process.poll() is not None:
                seconds = time.monotonic() - since
                print(f"  {name}: {seconds:.0f} s, exit code {process.returncode}", flush=True)
                del running[name], taken[name]
        time.sleep(0.2)
    for process, _ in running.values():
        process.send_signal(signal.SIGINT)
    for name, (process, _) in running.items():
        stop(process)
        print(f"  {name}: stopped", flush=True)
    for name, *_ in waiting:
        print(f"  {name}: not started", flush=True)
    print(f"caches filled: {time.monotonic() - start:.0f} s", flush=True)


def measure(part: Part, out: Path, env: dict[str, str], limit: float) -> bool:
    """Run a part, and move its tables into the folder if it is complete; return whether it is."""
    start = time.monotonic()
    log = out / "logs" / f"{part.name}.txt"
    with tempfile.TemporaryDirectory(dir=out) as folder, log.open("w+b") as text:
        words = arguments_of(part.command, Path(folder, part.table))
        process = subprocess.Popen(words, env=env, stdout=text, stderr=text, start_new_session=True)
        try:
            process.wait(limit)
            problem = "" if process.returncode == 0 else f"exit code {process.returncode}"
            stopped = False
        except subprocess.TimeoutExpired:
            stop(process)
            problem, stopped = f"stopped after {limit:.0f} s", True
        text.seek(0)
        lines = text.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith(BENCH_SAYS)]
        complete = not stopped and (
            process.returncode == 0
            or (
                part.command.startswith(BENCH)
                and process.returncode == MEASURED_WITH_FAILURES
                and not any(words in line for line in errors for words in ENDED_EARLY)
            )
        )
        for table in sorted(Path(folder).iterdir()):
            shutil.move(table, (out if complete else out / "partial") / table.name)
    seconds = time.monotonic() - start
    state = "measured" if complete else "not complete, the old table stays"
    print(f"{part.name}: {seconds:.0f} s, {state} {problem}".rstrip(), flush=True)
    if problem:
        print(*(f"    {line[:200]}" for line in errors or lines[-12:]), sep="\n", flush=True)
    return complete


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of the tables")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="PART")
    parser.add_argument("--skip", nargs="+", choices=NAMES, default=(), metavar="PART")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the limit of the whole run")
    parser.add_argument("--warm-up-seconds", type=float, default=130.0, help="0 for no warm-up")
    parser.add_argument("--at-once", type=int, default=max(2, (os.cpu_count() or 2) - 4))
    parser.add_argument("--gib", type=int, default=70, help="memory of the GPU for warm-ups")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "partita-caches"))
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    args = parser.parse_args(argv)
    start = time.monotonic()
    by_name = {part.name: part for part in PARTS}
    parts = [by_name[name] for name in dict.fromkeys(args.only) if name not in args.skip]
    if args.dry_run:
        for part in parts:
            for command in part.warm_up:
                print(f"{part.name}, warm-up: {shlex.join(arguments_of(command, args.out / '-'))}")
            words = arguments_of(part.command, args.out / part.table)
            print(f"{part.name}, at most {part.limit} s: {shlex.join(words)}")
        return 0
    for folder in (args.out / "logs", args.out / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    env = environment(args.cache.resolve())
    out = args.out.resolve()
    if args.warm_up_seconds:
        fill_caches(parts, out, env, args.warm_up_seconds, args.at_once, args.gib)
    missing = []
    for part in parts:
        left = args.seconds - (time.monotonic() - start) - SECONDS_TO_STOP
        if left < LEAST_SECONDS:
            print(f"{part.name}: no time left, the old table stays", flush=True)
            missing.append(part.name)
        elif not measure(part, out, env, min(part.limit, left)):
            missing.append(part.name)
    total = time.monotonic() - start
    print(f"{total:.0f} s; not measured: {', '.join(missing) or 'nothing'}", flush=True)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
