"""Compare the compiled code of recorded launches in two trees, without names and debug lines.

A refactoring that changes no kernel leaves it as it is:

    python tests/kernels/compare_ptx.py dump old.json      # in the old tree
    python tests/kernels/compare_ptx.py dump new.json      # in the new tree
    python tests/kernels/compare_ptx.py diff old.json new.json

A dump takes minutes. Kernels may have other names in the new tree. Each launch is compared as PTX
(for AMD as its assembly) and as Triton's GPU IR, in which parameters have no order here. Where the
IR alone is the same, the parameters have another order: LLVM numbers registers and sums integers
of addresses by it. Launches whose IR differs fail, and so do fewer launches in the new tree. Tests
have to see that two parameters of a type are not mistaken for one another.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]

Codes = dict[
    str, list[list[str]]
]  # the hashes of assembly and IR of launches, by target and kernel


def canonical_assembly(asm: dict[str, str]) -> str:
    """Return the instructions of PTX or AMD's assembly with the name of its kernel replaced."""
    if "ptx" in asm:
        code = re.split(r"\n\s*\.section\s", asm["ptx"])[0]
        noise = r"^\s*\.(loc|file)\b.*$|//.*$|\$L__(tmp|func|debug|info)\w*:?"
        names = re.findall(r"\.entry\s+(\w+)", code)
    else:
        code = re.split(r"\n\s*\.section\s+\.debug", asm["amdgcn"])[0]
        noise = r"^\s*\.(loc|file|ident)\b.*$|;.*$|\.L(tmp|func_begin|func_end)\w*:?"
        names = re.findall(r"\.globl\s+(\w+)", code)
    code = re.sub(noise, "", code, flags=re.M)
    for name in names:
        code = re.sub(rf"\b{name}", "kernel", code)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


def canonical_ir(ir: str) -> str:
    """Return Triton's GPU IR with values named by their order, and constants by what they are.

    Parameters have no order, and those that the kernel does not read are left out.
    """
    ir = re.sub(r"^#loc.*$| loc\((?:[^()]|\([^()]*\))*\)", "", ir, flags=re.M)
    head, signature, body = re.split(r"tt\.func public @\w+\((.*)\) attributes", ir)
    for alias, layout in re.findall(r"^(#\w+) = (.*)$", head, re.M):
        body = re.sub(rf"{alias}\b", layout, body)  # layouts are numbered by their first use
    head = re.sub(r"^#\w+ = .*$", "", head, flags=re.M)
    known: dict[str, str] = {}
    fresh = (f"%v{number}" for number in itertools.count())

    def named(found: re.Match[str]) -> str:
        return known.setdefault(found[0], next(fresh))

    lines = head.splitlines()
    for line in body.splitlines():
        if constant := re.match(r"\s*(%[\w-]+) = (arith\.constant .*?)\s*$", line):
            known[constant[1]] = f"<{constant[2]}>"
            continue
        # A name may have another value in each region: what defines it gives it a new number.
        defined = (
            r"%[\w-]+(?=: )" if "^bb" in line else r"%[\w-]+(?=(?::\d+)?(?:, %[\w-]+(?::\d+)?)* = )"
        )
        known.update((name, next(fresh)) for name in re.findall(defined, line))
        lines.append(re.sub(r"%[\w-]+", named, line))
    listed = re.findall(r"(%[\w-]+): ([^%]+?)(?=, %|$)", signature)
    lines += sorted(f"{known[name]}: {kind}" for name, kind in listed if name in known)
    return "\n".join(line for line in lines if line.strip())


def hashes_of(job: tuple[str, str]) -> list[list[str]]:
    """Return the hashes of the code of a kernel for a target."""
    from helpers.compilation import TARGETS, chosen, compiled

    target, kernel = job
    found = []
    for launch in chosen(kernel, target):
        asm = compiled(launch, TARGETS[target].target).asm
        codes = canonical_assembly(asm), canonical_ir(asm["ttgir"])
        found.append([hashlib.sha256(code.encode()).hexdigest() for code in codes])
    print(f"{target} {kernel}: {len(found)} launches", flush=True)
    return found


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


def differences(old: Codes, new: Codes, part: int) -> list[str]:
    """Return a line for each kernel with launches that the other tree has not.

    The part is 0 for assembly, 1 for IR.
    """
    lines = []
    for mark, own, other in (("-", old, new), ("+", new, old)):
        known = Counter(
            (key.split()[0], code[part]) for key, each in other.items() for code in each
        )
        for key, codes in own.items():
            missing = Counter((key.split()[0], code[part]) for code in codes)
            missing.subtract({code: known[code] for code in missing})
            number = sum(excess for excess in missing.values() if excess > 0)
            if number:
                lines.append(f"{mark} {key}: {number} of {len(codes)} launches")
    return lines


def load(path: Path, names: str) -> Codes:
    """Return what a dump has of the kernels whose names have a pattern."""
    found: Codes = json.loads(path.read_text(encoding="utf-8"))
    return {key: codes for key, codes in found.items() if re.search(names, key.split()[1])}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the code of the launches of two trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    dump_command = commands.add_parser("dump", help="compile this tree")
    dump_command.add_argument("out", type=Path)
    dump_command.add_argument("--targets", default="sm_80,sm_90,sm_100,gfx942")
    diff_command = commands.add_parser("diff", help="compare two dumps")
    diff_command.add_argument("old", type=Path)
    diff_command.add_argument("new", type=Path)
    for command in (dump_command, diff_command):
        command.add_argument("--names", default="", help="a pattern that names of kernels have")
    args = parser.parse_args()
    if args.command == "dump":
        dump(args.out, args.targets.split(","), args.names)
        return 0
    old, new = load(args.old, args.names), load(args.new, args.names)
    before, after = (sum(map(len, each.values())) for each in (old, new))
    lines, reordered = differences(old, new, 1), differences(old, new, 0)
    print("\n".join(lines) or "all launches are the same")
    if reordered and not lines:
        print("\n".join(["apart from the order of their parameters:", *reordered]))
    print(f"{before} and {after} launches")
    return int(bool(lines) or after < before)


if __name__ == "__main__":
    sys.exit(main())
