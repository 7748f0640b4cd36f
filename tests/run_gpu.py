"""Run every test that needs a GPU: `make test-gpu`, or `python tests/run_gpu.py [options]`.

One process collects the tests and forks the workers, so the imports happen once. Each worker has
one GPU and takes tests of one file at a time, because these share kernels. Tests of several GPUs
come first, in workers that see all GPUs, beside the longest of the others. Tests that need the
memory of a whole GPU have a worker of their own on each; the others keep to a share that leaves it
room.

The results are stored in `.test-gpu.json` with a digest of the sources. `--resume` runs what has
not passed on the present sources.
"""

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

# A process that has asked the driver for its GPUs cannot be forked. With this, PyTorch asks NVML.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import pytest
import torch

ROOT = Path(__file__).parents[1]
RECORD = ROOT / ".test-gpu.json"
KINDS = ("multigpu", "whole_gpu", "gpu")
GIB = 2**30
ORDINARY, WHOLE = 7 * GIB, 36 * GIB  # what a worker of these tests may allocate; few need so much
BATCH = 6  # tests that a worker gets at once, while there are many
LIMIT = 400.0  # seconds after which a test counts as hanging
SECONDS_BETWEEN_LINES = 10.0


def digest(root: Path) -> str:
    """Return a digest of the sources, the tests and the version of PyTorch."""
    found = hashlib.sha256(torch.__version__.encode())
    for folder in ("src", "tests", "examples"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()


class Record:
    """The results of earlier runs: what has passed on these sources, and how long tests take."""

    def __init__(self, path: Path) -> None:
        self.path, self.digest = path, digest(ROOT)
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.seconds: dict[str, float] = known.get("seconds", {})
        is_same = known.get("digest") == self.digest
        self.passed: set[str] = set(known["passed"]) if is_same else set()

    def store(self) -> None:
        content = {"digest": self.digest, "passed": sorted(self.passed), "seconds": self.seconds}
        self.path.write_text(json.dumps(content, indent=0), encoding="utf-8")


class Queue:
    """The tests of one kind that are left: the long ones, and the others by file."""

    def __init__(
        self, session: pytest.Session, indices: list[int], seconds: dict[str, float], workers: int
    ):
        self.names, self.seconds = [item.nodeid for item in session.items], seconds
        self.num_workers = workers
        self.long: list[int] = []
        self.files: dict[str, list[int]] = defaultdict(list)
        self.workers: Counter[str] = Counter()  # how many are at a file
        for index in indices:
            is_long = session.items[index].get_closest_marker("long")
            (self.long if is_long else self.files[self.file(index)]).append(index)
        self.all_of_files = {file: list(of) for file, of in self.files.items()}

    def file(self, index: int) -> str:
        return self.names[index].partition("::")[0]

    def take(self) -> list[int]:
        """Return a long test, or tests of the file that has most to do for each worker at it."""

        def load(file: str) -> float:
            names = [self.names[index] for index in self.all_of_files[file]]
            known = [self.seconds[name] for name in names if name in self.seconds]
            usual = sum(known) / len(known) if known else 1.5
            left = sum(self.seconds.get(self.names[index], usual) for index in self.files[file])
            return left / (1 + self.workers[file])

        if self.long:
            index = self.long.pop(0)
            self.workers[self.file(index)] += 1
            return [index]
        files = [file for file, rest in self.files.items() if rest]
        if not files:
            return []
        file = max(files, key=load)
        rest = self.files[file]
        # Near the end the batches are small, so that all workers end at about one time.
        left = sum(map(len, self.files.values()))
        number = max(1, min(BATCH, left // (2 * self.num_workers)))
        batch, self.files[file] = rest[:number], rest[number:]
        self.workers[file] += 1
        return batch


class Worker:
    """A forked process that runs tests of the collected session.

    Fields:
        kind, gpu: which tests it runs, and the GPUs that it sees.
        batch: the tests that it has and has not finished, in order.
        started: whether it has begun with the first of them.
        since: when it began, or got the batch.
    """

    def __init__(self, session: pytest.Session, kind: str, gpu: str) -> None:
        self.kind, self.gpu = kind, gpu
        self.batch: list[int] = []
        self.started, self.since = False, time.monotonic()
        self.connection, other = multiprocessing.Pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                self.connection.close()
                serve(session, other, kind, gpu)
            finally:
                os._exit(0)
        other.close()

    def give(self, batch: list[int]) -> None:
        self.batch, self.started, self.since = batch, False, time.monotonic()
        self.connection.send(batch)

    def stop(self) -> None:
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def serve(session: Any, connection: Any, kind: str, gpu: str) -> None:
    """Run the tests that the connection names, and send their reports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)  # Those that the parent has started do not live in this process.
    output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    if kind != "multigpu" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        share = WHOLE if kind == "whole_gpu" else ORDINARY
        torch.cuda.set_per_process_memory_fraction(min(1.0, share / total))
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")

    class Reports:
        def pytest_runtest_logreport(self, report: Any) -> None:
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
            printed = os.pread(output.fileno(), 2**20, 0).decode(errors="replace")
            connection.send(("report", data, printed[-3000:] if report.failed else ""))

    config.pluginmanager.register(Reports())
    while True:
        batch = connection.recv()
        for index, after in zip(batch, [*batch[1:], None], strict=True):
            connection.send(("start", index, ""))
            os.ftruncate(output.fileno(), 0)
            os.lseek(output.fileno(), 0, os.SEEK_SET)
            following = None if after is None else session.items[after]
            config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=following)
            connection.send(("done", index, ""))
            try:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            except RuntimeError:  # The context is lost, and every later test would fail.
                return


class Runner:
    """The plugin of the process that collects the tests and forks the workers."""

    def __init__(self, record: Record, resume: bool, gpus: int, cores: int) -> None:
        self.record, self.resume, self.gpus, self.cores = record, resume, gpus, cores
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # of skipped tests
        self.failures: list[str] = []
        self.start = self.said = time.monotonic()
        self.total = self.finished = self.earlier = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.resume:
            known = self.record.passed
            self.earlier = sum(item.nodeid in known for item in items)
            items[:] = [item for item in items if item.nodeid not in known]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.config.option.collectonly:
            return True
        self.session, self.total = session, len(session.items)
        self.say(
            f"{self.total} tests, {self.earlier} passed before; {self.gpus} GPUs, {self.cores}"
            f" cores; collected in {time.monotonic() - self.start:.0f} s"
        )
        kinds: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for index, item in enumerate(session.items):
            kinds[next(kind for kind in KINDS if item.get_closest_marker(kind))].append(index)
        try:
            if self.gpus < 2:
                self.skip(kinds.pop("multigpu"), "needs 2 GPUs")
            if not self.gpus:
                self.skip([i for of in kinds.values() for i in of], "needs a GPU")
                return True
            every = ",".join(map(str, range(self.gpus)))
            few = max(2, self.cores // 4)
            several = [("multigpu", every)] * (few if kinds.get("multigpu") else 0)
            alone = [("whole_gpu", str(gpu)) for gpu in range(self.gpus)]
            ordinary = [("gpu", str(i % self.gpus)) for i in range(max(self.gpus, self.cores))]
            self.run(kinds, [*several, *ordinary[:few]], [*alone, *ordinary[few:]])
        finally:
            self.record.store()
        return True

    def run(
        self,
        kinds: dict[str, list[int]],
        places: list[tuple[str, str]],
        later: list[tuple[str, str]],
    ) -> None:
        """Run tests in a worker for each kind and GPU, in some of them once there are cores."""
        workers = Counter(kind for kind, _ in (*places, *later))
        seconds = self.record.seconds
        self.queues = {
            kind: Queue(self.session, of, seconds, workers[kind]) for kind, of in kinds.items()
        }
        self.workers: list[Worker] = []
        try:
            for place in places:
                self.employ(*place)
            while self.workers or later:
                while later and self.processes() < self.cores:
                    self.employ(*later.pop(0))
                connections = [worker.connection for worker in self.workers]
                ready = multiprocessing.connection.wait(connections, 1.0)
                for worker in list(self.workers):
                    if worker.connection in ready:
                        self.receive(worker)
                    elif time.monotonic() - worker.since > LIMIT:
                        self.replace(worker, f"ran for more than {LIMIT:.0f} s")
                self.progress()
        finally:
            for worker in self.workers:
                worker.stop()

    def processes(self) -> int:
        """Return how many processes run tests; a test of several GPUs starts one for each."""
        return sum(self.gpus if worker.kind == "multigpu" else 1 for worker in self.workers)

    def employ(self, kind: str, gpu: str, batch: list[int] | None = None) -> None:
        """Fork a worker for a batch, or for the next one of its kind if there is one."""
        batch = batch or self.queues[kind].take()
        if batch:
            worker = Worker(self.session, kind, gpu)
            self.workers.append(worker)
            worker.give(batch)

    def receive(self, worker: Worker) -> None:
        """Take one message of a worker."""
        try:
            what, content, printed = worker.connection.recv()
        except (EOFError, ConnectionError):
            what = "ended"
        if what == "ended":
            self.replace(worker, "its process ended")
        elif what == "start":
            worker.started, worker.since = True, time.monotonic()
        elif what == "report":
            config = self.session.config
            report = config.hook.pytest_report_from_serializable(config=config, data=content)
            self.note(report, printed)
        else:
            worker.started = False
            self.finish(worker)
            if not worker.batch:
                self.leave(worker, content)
                if batch := self.queues[worker.kind].take():
                    worker.give(batch)
                else:
                    self.workers.remove(worker)
                    worker.stop()

    def finish(self, worker: Worker) -> int:
        """Count the test that a worker runs as finished, and return its index."""
        self.finished += 1
        return worker.batch.pop(0)

    def leave(self, worker: Worker, index: int) -> None:
        queue = self.queues[worker.kind]
        queue.workers[queue.file(index)] -= 1

    def replace(self, worker: Worker, why: str) -> None:
        """Let another worker go on after one that died or hangs; the test it ran has failed."""
        self.workers.remove(worker)
        worker.stop()
        if worker.started:
            index = self.finish(worker)
            self.fail(self.session.items[index].nodeid, why)
            if not worker.batch:
                self.leave(worker, index)
        self.employ(worker.kind, worker.gpu, worker.batch)

    def note(self, report: Any, printed: str) -> None:
        """Count a report, and print a failure at once."""
        seconds = self.record.seconds
        before = 0.0 if report.when == "setup" else seconds.get(report.nodeid, 0.0)
        seconds[report.nodeid] = round(before + report.duration, 3)
        if report.failed:
            self.fail(report.nodeid, f"{report.longreprtext}\n{printed}")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to"
            self.outcomes["skipped"] += 1
            self.reasons[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.outcomes["passed"] += 1
            self.record.passed.add(report.nodeid)

    def fail(self, name: str, message: str) -> None:
        self.outcomes["failed"] += 1
        self.failures.append(name)
        self.record.passed.discard(name)
        self.say(f"FAILED {name}\n{message}")

    def skip(self, indices: list[int], reason: str) -> None:
        self.outcomes["skipped"] += len(indices)
        self.reasons[reason] += len(indices)
        self.finished += len(indices)

    def progress(self) -> None:
        now = time.monotonic()
        if now - self.said > SECONDS_BETWEEN_LINES:
            self.said = now
            failed = f", {self.outcomes['failed']} failed" if self.failures else ""
            done = f"{self.finished} of {self.total}{failed}"
            self.say(f"[{now - self.start:4.0f} s] {done}, {len(self.workers)} processes")
            self.record.store()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def summary(self) -> str:
        lines = [f"{count:6} skipped: {reason}" for reason, count in self.reasons.most_common()]
        lines += [f"       failed: {name}" for name in self.failures]
        parts = [f"{self.outcomes[kind]} {kind}" for kind in ("passed", "failed", "skipped")]
        parts += [f"{self.earlier} passed before"] * bool(self.earlier)
        left = self.total - self.finished
        parts += [f"{left} not run"] * bool(left)
        lines.append(f"test-gpu: {', '.join(parts)} in {time.monotonic() - self.start:.0f} s")
        return "\n".join(lines)


def main(argv: list[str], *, gpus: int | None = None, record: Path = RECORD) -> int:
    """Run the tests, print the summary, and return 0 if all have passed or were skipped."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--slowest", type=int, default=0)
    known, rest = parser.parse_known_args(argv)
    os.chdir(ROOT)
    gpus = torch.cuda.device_count() if gpus is None else gpus
    runner = Runner(Record(record), known.resume, gpus, os.cpu_count() or 1)
    options = ["-m", " or ".join(KINDS), "--capture=no", "-p", "no:cacheprovider", "-W", "ignore"]
    try:
        code = int(pytest.main([*options, "-q", "--no-summary", *rest], plugins=[runner]))
    except KeyboardInterrupt:
        code = 130
    seconds = sorted(runner.record.seconds.items(), key=lambda pair: -pair[1])
    print("".join(f"{value:6.1f} s {name}\n" for name, value in seconds[: known.slowest]), end="")
    print(runner.summary(), flush=True)
    bad = runner.failures or runner.finished < runner.total
    return code if code > 1 else int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
