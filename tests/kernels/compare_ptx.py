"""Compare the PTX of all recorded launches in two trees, without names, comments and debug lines.

A refactoring that changes no kernel leaves it as it is:

    python tests/kernels/compare_ptx.py dump old.json      # in the old tree
    python tests/kernels/compare_ptx.py dump new.json      # in the new tree
    python tests/kernels/compare_ptx.py diff old.json new.json

A dump takes minutes. Kernels may have other names in the new tree.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def canonical(ptx: str) -> str:
    """Return the instructions of PTX with the name of its kernel replaced."""
    ptx = re.split(r"\n\s*\.section\s", ptx)[0]
    ptx = re.sub(
        r"^\s*\.(loc|file)\b.*$|//.*$|\$L__(tmp|func|debug|info)\w*:?", "", ptx, flags=re.M
    )
    for name in re.findall(r"\.entry\s+(\w+)", ptx):
        ptx = ptx.replace(name, "kernel")
    return "\n".join(line.strip() for line in ptx.splitlines() if line.strip())


def dump(path: Path, targets: list[str]) -> None:
    """Write the hashes of the PTX of each kernel and target."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    from helpers.compilation import TARGETS, chosen, compiled
    from helpers.launches import NAMES

    result = {}
    for kernel in NAMES:
        for target in targets:
            hashes = []
            for launch in chosen(kernel, target):
                ptx = canonical(compiled(launch, TARGETS[target].target).asm["ptx"])
                hashes.append(hashlib.sha256(ptx.encode()).hexdigest())
            result[f"{target} {kernel}"] = hashes
            print(f"{target} {kernel}: {len(hashes)} launches", flush=True)
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
    parser = argparse.ArgumentParser(description="Compare the PTX of all launches of two trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dump", help="compile this tree")
    command.add_argument("out", type=Path)
    command.add_argument("--targets", default="sm_80,sm_90,sm_100")
    command = commands.add_parser("diff", help="compare two dumps")
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    args = parser.parse_args()
    if args.command == "dump":
        dump(args.out, args.targets.split(","))
        return 0
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (args.old, args.new))
    lines = differences(old, new)
    print("\n".join(lines) or f"all {sum(map(len, new.values()))} launches are the same")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
