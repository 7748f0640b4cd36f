"""Compare the PTX or AMDGCN of recorded launches in two trees, without names and debug lines.

A refactoring that changes no kernel leaves it as it is:

    python tests/kernels/compare_ptx.py dump old.json      # in the old tree
    python tests/kernels/compare_ptx.py dump new.json      # in the new tree
    python tests/kernels/compare_ptx.py diff old.json new.json

A dump takes minutes. Kernels may have other names in the new tree. The difference lists the
launches that one of the trees has not, and fails too if the new tree has fewer of them.
"""

import argparse
import hashlib
import json
import multiprocessing
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def canonical(asm: dict[str, str]) -> str:
    """Return the instructions of a compiled kernel with its name replaced."""
    if "amdgcn" in asm:
        code = re.split(r"\n\s*\.section\s+\.debug", asm["amdgcn"])[0]
        names = re.findall(r"\.globl\s+(\w+)", code)
        noise = r"^\s*\.(loc|file|ident)\b.*$|;.*$|\.L(tmp|func_begin|func_end)\w*:?"
    else:
        code = re.split(r"\n\s*\.section\s", asm["ptx"])[0]
        names = re.findall(r"\.entry\s+(\w+)", code)
        noise = r"^\s*\.(loc|file)\b.*$|//.*$|\$L__(tmp|func|debug|info)\w*:?"
    code = re.sub(noise, "", code, flags=re.M)
    for name in names:
        code = code.replace(name, "kernel")
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


def hashes_of(job: tuple[str, str]) -> list[str]:
    """Return the hashes of the code of a kernel for a target."""
    from helpers.compilation import TARGETS, chosen, compiled

    target, kernel = job
    codes = [
        canonical(compiled(each, TARGETS[target].target).asm) for each in chosen(kernel, target)
    ]
    print(f"{target} {kernel}: {len(codes)} launches", flush=True)
    return [hashlib.sha256(code.encode()).hexdigest() for code in codes]


def dump(path: Path, targets: list[str], names: str) -> None:
    """Write the hashes of the code of each kernel whose name has a pattern, for each target."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    from helpers.compilation import NVIDIA_ONLY
    from helpers.launches import NAMES, launches

    for target in targets:  # before the processes part
        launches(None if target == "gfx942" else "13.0")
    jobs = [
        (target, kernel)
        for kernel in NAMES
        for target in targets
        if re.search(names, kernel) and not (target == "gfx942" and kernel.startswith(NVIDIA_ONLY))
    ]
    with multiprocessing.get_context("fork").Pool() as pool:
        found = pool.map(hashes_of, jobs, chunksize=1)
    result = {" ".join(job): hashes for job, hashes in zip(jobs, found, strict=True)}
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")


def differences(old: dict[str, list[str]], new: dict[str, list[str]]) -> list[str]:
    """Return a line for each kernel with launches that the other tree has not."""
    lines = []
    for mark, own, other in (("-", old, new), ("+", new, old)):
        known = Counter((key.split()[0], code) for key, codes in other.items() for code in codes)
        for key, codes in own.items():
            missing = Counter((key.split()[0], code) for code in codes)
            missing.subtract({code: known[code] for code in missing})
            number = sum(excess for excess in missing.values() if excess > 0)
            if number:
                lines.append(f"{mark} {key}: {number} of {len(codes)} launches")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the code of the launches of two trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dump", help="compile this tree")
    command.add_argument("out", type=Path)
    command.add_argument("--targets", default="sm_80,sm_90,sm_100,gfx942")
    command.add_argument("--names", default="", help="a pattern that names of kernels have")
    command = commands.add_parser("diff", help="compare two dumps")
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    args = parser.parse_args()
    if args.command == "dump":
        dump(args.out, args.targets.split(","), args.names)
        return 0
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (args.old, args.new))
    lines = differences(old, new)
    before, after = (sum(map(len, each.values())) for each in (old, new))
    print(
        "\n".join(lines) or "all launches are the same", f"{before} and {after} launches", sep="\n"
    )
    return int(bool(lines) or after < before)


if __name__ == "__main__":
    sys.exit(main())
