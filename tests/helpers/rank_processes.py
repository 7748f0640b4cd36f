"""The start of the ranks of a test."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def launch(kind: str, worlds: tuple[int, ...], what: str, store: Path) -> list[tuple[int, str]]:
    """Run all ranks of each world, and return their exit codes and outputs."""
    script = str(Path(__file__).with_name("ranks.py"))
    path = os.pathsep.join(filter(None, sys.path))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "PARTITA_TEST_FOLDER": str(store.parent),
    }
    arguments = [",".join(map(str, worlds)), str(store), kind, what]
    ranks = subprocess.Popen(
        [sys.executable, "-W", "ignore", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        codes = ranks.communicate(timeout=600)[0].split()
    except BaseException:
        os.killpg(ranks.pid, signal.SIGKILL)
        raise
    outputs = [
        Path(f"{store}.{world}.{rank}").read_text() for world in worlds for rank in range(world)
    ]
    return [(int(code), text) for code, text in zip(codes, outputs, strict=True)]
