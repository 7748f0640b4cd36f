"""Time ops on a GPU by CUDA events, as a CUDA graph and eagerly, and write tables of this folder.

    python docs/bench/eager.py --out docs/bench

Inputs are those of `partita bench`, which also checks the results; this script only times them.

- `gpu_ms` is measured between CUDA events, with so much work queued ahead that the host is hidden.
- `replay_ms` is the replay of a CUDA graph of a call of Partita, which leaves the host out. Lengths
  are on the GPU then, as a call with lengths on the host cannot be captured.
- `eager_ms` is what a loop of plain calls takes by the clock, host and GPU together.

Times are medians, of forward and backward where the op has a gradient. `eager.csv` has them all.
`linear_chain_gpu.csv`, `semi_markov_gpu.csv` and `rnnt_gpu.csv` are taken from it for the pages:
their times are replays, and times by CUDA events where there is no replay.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from partita.bench.case import DTYPE_NAMES, Attempt, Buffers, Case, Loop, Provider, Settings
from partita.bench.cli import OPS as CASES
from partita.bench.measure import time_steps
from partita.bench.providers import OURS, PEERS
from partita.bench.runner import require_device, takers

FP32, BF16 = (torch.float32,), (torch.bfloat16,)
# The op of `partita bench`, the dtypes, and the widths; no widths for the sizes of the op.
OPS: tuple[tuple[str, tuple[torch.dtype, ...], tuple[int, ...]], ...] = (
    ("linear_chain", FP32, ()),
    ("semi_markov", FP32, ()),
    ("rnnt", FP32 + BF16, ()),
    ("decode", FP32, ()),
    ("ctc", FP32, ()),
    ("chain", FP32, ()),
    ("cross_entropy", BF16, (32768,)),
    ("token_stats", BF16, (32768,)),
    ("linear_cross_entropy", BF16, (32768,)),
)
# Loops in Python over the steps have times in the tables of `partita bench`.
OPS_OF_PEERS = {
    "torch": ("ctc", "cross_entropy", "token_stats", "linear_cross_entropy"),
    "torchaudio": ("rnnt", "linear_rnnt"),
}
# An `inplace` loss needs its logits again before each call, which the clock would include.
PROVIDERS = (
    *(each for each in OURS if not each.overwrites),
    *(each for each in PEERS if each.name in OPS_OF_PEERS),
)
ROUNDS, ROUND_SECONDS, MAX_CALLS = 5, 0.02, 20
MIB = 2**20
COLUMNS = (
    *("op", "provider", "dtype", "size", "gpu_ms", "replay_ms", "eager_ms", "extra_mib"),
    *("note", "machine", "torch"),
)
Record = dict[str, Any]


def run(loop: Loop) -> None:
    loop.before()
    for _, step in loop.steps:
        step()


def events_ms(loop: Loop, device: torch.device, repetitions: int) -> float:
    times = time_steps(loop.steps, device, before=loop.before, repetitions=repetitions)
    return times["total" if len(loop.steps) > 1 else loop.steps[0][0]].median


def replay_ms(loop: Loop, device: torch.device, repetitions: int) -> float:
    """Return the time of the replay of a CUDA graph of all steps.

    Raises:
        RuntimeError: a step cannot be captured.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run(loop)
        run(loop)
    torch.cuda.synchronize(device)
    loop.before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _, step in loop.steps:
            step()
    times = time_steps([("replay", graph.replay)], device, repetitions=repetitions)
    torch.cuda.synchronize(device)
    return times["replay"].median


def eager_ms(loop: Loop, device: torch.device) -> float:
    """Return the time of a call by the clock: the median of rounds of calls that are waited for."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run(loop)
        wait()
        return (time.perf_counter() - start) / calls

    seconds(1)
    calls = max(1, min(MAX_CALLS, int(ROUND_SECONDS / seconds(1))))
    return 1e3 * statistics.median(seconds(calls) for _ in range(ROUNDS))


def on_device(inputs: Any, device: torch.device) -> Any:
    """Return the inputs of a case with all tensors on the device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    tensors = {
        name: value.to(device)
        for name, value in inputs._asdict().items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu"
    }
    return inputs._replace(**tensors)


def record(
    case: Case, provider: Provider, inputs: Any, device: torch.device, repetitions: int
) -> Record:
    """Measure a provider; what it refuses is in the note."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found: Record = {
        **{"op": case.op, "provider": provider.name, "dtype": DTYPE_NAMES[case.dtype]},
        **{"size": case.size(case.sizes), "machine": name, "torch": torch.__version__},
    }
    try:
        if reason := provider.refusal(case.op, inputs):
            return found | {"note": f"refuses: {reason}"}
        function = provider.ops[case.op]()
        loop = case.loops(Attempt(function, inputs, provider))[-1]
        run(loop)
        found["gpu_ms"] = events_ms(loop, device, repetitions) if device.type == "cuda" else ""
        found["eager_ms"] = eager_ms(loop, device)
        memory = case.extra_memory(Attempt(function, inputs, provider), device)
        found["extra_mib"] = "" if memory is None else round(memory / MIB)
        if device.type == "cuda" and provider in OURS:
            loop.before()
            loop = case.loops(Attempt(function, on_device(inputs, device), provider))[-1]
            try:
                found["replay_ms"] = replay_ms(loop, device, repetitions)
            except Exception as error:
                require_device(device, error)
                found["note"] = f"no capture: {str(error).splitlines()[0][:100]}"
        loop.before()
    except Exception as error:
        require_device(device, error)
        found["note"] = f"refuses: {str(error).partition(chr(10))[0][:100]}"
    return found


def measured(settings: Settings, names: Sequence[str]) -> Iterator[tuple[Case, Record]]:
    """Yield the cases of the ops of these names with their records, as soon as they are known."""
    for name, dtypes, columns in OPS:
        if name not in names:
            continue
        own = Settings(**{**vars(settings), "dtypes": dtypes, "columns": columns})
        buffers = Buffers(settings.device)
        for case in CASES[name](own):
            inputs = case.inputs(buffers)
            for provider in takers(case, PROVIDERS):
                if provider in OURS or case.op in OPS_OF_PEERS[provider.name]:
                    yield case, record(case, provider, inputs, settings.device, own.repetitions)
            del inputs
        del buffers
        gc.collect()


def time_of(found: Record) -> str:
    """Return the time of a replay, or by CUDA events without one; empty without both."""
    value = found.get("replay_ms") or found.get("gpu_ms") or ""
    return value and f"{value:.3f}"


class Found:
    """The records by op, provider, dtype and the sizes of the case."""

    def __init__(self, records: Iterable[tuple[Case, Record]]) -> None:
        self._records = {
            (each["op"], each["provider"], each["dtype"], sizes(case)): each
            for case, each in records
        }

    def all_sizes(self, op: str) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(key[3] for key in self._records if key[0] == op))

    def get(
        self, op: str, size: tuple[int, ...], dtype: str = "fp32", provider: str = "partita"
    ) -> Record:
        return self._records.get((op, provider, dtype, size), {})


def sizes(case: Case) -> tuple[int, ...]:
    """Return the sizes of a case by which the lines of its table differ, without hidden states."""
    return tuple(getattr(case, name) for name in case.sizes if name != "hidden")


def chains(found: Found, op: str, best: str, names: Sequence[str]) -> list[Record]:
    """Return the table of chains: the loss with its gradients and the best path of each size."""
    lines = []
    for size in found.all_sizes(op):
        line: Record = dict(zip(names, size, strict=True))
        for column, each in (
            ("loss", found.get(op, size)),
            ("best_path", found.get(best, size)),
        ):
            eager = each.get("eager_ms", "")
            line |= {f"{column}_ms": time_of(each), f"{column}_eager_ms": eager and f"{eager:.3f}"}
        lines.append(line | {"machine": found.get(op, size).get("machine", "")})
    return lines


def transducers(found: Found) -> list[Record]:
    """Return the table of transducers."""
    lines = []
    for size in found.all_sizes("rnnt"):
        hidden = found.get("linear_rnnt", size, "bf16")
        own, half = found.get("rnnt", size), found.get("rnnt", size, "bf16")
        line: Record = dict(zip(("sequences", "steps", "labels", "classes"), size, strict=True))
        line["fp32_logits_ms"] = time_of(own)
        line["torchaudio_ms"] = time_of(found.get("rnnt", size, provider="torchaudio"))
        line["bf16_logits_ms"], line["bf16_hidden_ms"] = time_of(half), time_of(hidden)
        line["bf16_hidden_mib"] = hidden.get("extra_mib", "")
        for name, each in (("fp32_logits", own), ("bf16_hidden", hidden)):
            eager = each.get("eager_ms", "")
            line[f"{name}_eager_ms"] = eager and f"{eager:.3f}"
        lines.append(line | {"machine": own.get("machine", "")})
    return lines


TABLES: dict[str, tuple[str, Callable[[Found], list[Record]]]] = {
    "linear_chain_gpu.csv": (
        "linear_chain",
        lambda found: chains(
            found, "linear_chain", "linear_viterbi", ("steps", "sequences", "states")
        ),
    ),
    "semi_markov_gpu.csv": (
        "semi_markov",
        lambda found: chains(
            found,
            "semi_markov",
            "semi_markov_viterbi",
            ("steps", "sequences", "states", "durations"),
        ),
    ),
    "rnnt_gpu.csv": ("rnnt", transducers),
}


def write(path: Path, columns: Sequence[str], lines: Iterable[Record]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the folder of the tables")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    names = [op[0] for op in OPS]
    parser.add_argument("--ops", nargs="+", default=names, choices=names, metavar="OP")
    args = parser.parse_args(argv)
    device = torch.empty(0, device=args.device).device
    settings = Settings((), (), None, args.quick, False, args.repetitions, device)
    found = []
    try:
        for case, each in measured(settings, args.ops):
            found.append((case, each))
            for column in ("gpu_ms", "replay_ms", "eager_ms"):
                if value := each.get(column):
                    each[column] = float(f"{value:.4g}")
            print(*(f"{each[key]}" for key in COLUMNS[:-2] if key in each), sep=", ", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    if args.out:
        write(args.out / "eager.csv", COLUMNS, (each for _, each in found))
        for name, (op, table) in TABLES.items():
            if op in args.ops and (lines := table(Found(found))):
                write(args.out / name, list(lines[0]), lines)


if __name__ == "__main__":
    main()
