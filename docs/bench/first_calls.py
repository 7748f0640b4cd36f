"""Time the first call of ops in fresh processes, and write a table of this folder.

    python docs/bench/first_calls.py --out docs/bench/first_calls.csv

Each op runs in a process with an empty cache of kernels, and then in one with the cache that the
first has filled. Nothing else should run on the machine at that time.
"""

from __future__ import annotations

import argparse
import csv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from partita.bench.host import first_call

OPS = ("softmax", "cross_entropy", "ctc_loss", "linear_chain", "logz", "viterbi")
COLUMNS = ("op", "empty_cache_s", "filled_cache_s", "machine", "torch", "triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the table to write")
    parser.add_argument("--ops", nargs="+", default=OPS, metavar="OP")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.empty(0, device=args.device).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    with args.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for op in args.ops:
            found = first_call(op, "partita", device)
            if "note" in found:
                print(f"{op}: {found['note']}", flush=True)
                continue
            seconds = f"{found['empty_cache_s']:.3f}", f"{found['filled_cache_s']:.3f}"
            line = (op, *seconds, name, torch.__version__.partition("+")[0], triton)
            writer.writerow(dict(zip(COLUMNS, line, strict=True)))
            file.flush()
            print(*line, flush=True)


if __name__ == "__main__":
    main()
