"""Train the language model of language_model.py with its vocabulary spread over several processes.

    torchrun --nproc-per-node 2 examples/train_parallel.py --batches 200 --out train_parallel.png

Each rank, a GPU or a process on the CPU, has the whole transformer and its own rows of the head's
matrix, as `torch.chunk` divides them. All ranks see the same batches.
`partita.parallel.linear_cross_entropy` gives each rank the same loss and the complete gradient of
the hidden states, so the transformer stays equal on all ranks without communication. The script
checks that at the end, and its exit code is 1 if the transformers differ. Without torchrun one
process has all rows.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported before a group exists, which its functions would keep alive
from digits import BLUE, INK, positive, training_bar
from language_model import ON_CPU, ON_GPU, LanguageModel, Sizes, batches, load, precision
from matplotlib.figure import Figure
from torch import Tensor, nn

import partita

REPORTED_BATCHES = 10  # whose mean is the loss at the start and at the end


class Data(NamedTuple):
    tokens: Tensor  # [N]
    vocabulary: int  # tokens of the tokenizer, which may find fewer than was asked for


class Training(NamedTuple):
    losses: list[float]  # one for each batch
    milliseconds: list[float]  # one for each batch


class Rank(NamedTuple):
    """The report of one rank at the end."""

    checksum: list[int]
    rows: int  # of the head's matrix
    mebibytes: float  # memory of these rows, their gradient and the optimizer's state


@dataclass(frozen=True)
class Report:
    training: Training
    ranks: list[Rank]

    @property
    def equal(self) -> bool:
        """Return whether the transformer has the same bits on all ranks."""
        return all(rank.checksum == self.ranks[0].checksum for rank in self.ranks)


def join() -> torch.device:
    """Join the other processes of torchrun, if it started this one, and return the device."""
    single_process = (
        {}
        if "WORLD_SIZE" in os.environ
        else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **single_process)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    # Otherwise a GPU sums the gradient of attention in any order, and the ranks drift apart.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("nccl", device_id=device, **single_process)
    return device


def shared_text(sizes: Sizes, seed: int, device: torch.device) -> Data:
    """Read the text on the first rank, and return it on all ranks."""
    shared: list[Data | None] = [None]
    if dist.get_rank() == 0:
        text = load(sizes, seed)
        shared = [Data(text.train, text.tokenizer.get_vocab_size())]
    dist.broadcast_object_list(shared, device=device)
    data = shared[0]
    if len(data.tokens) <= sizes.length:
        raise ValueError(
            f"megabytes: expected text enough for {sizes.length} tokens, got {len(data.tokens)}"
        )
    return data


def build(sizes: Sizes, seed: int, device: torch.device) -> LanguageModel:
    """Return the model, which starts the same for any number of ranks, with this rank's head rows.

    The head is not tied to the embedding.
    """
    torch.manual_seed(seed)
    model = LanguageModel(sizes)
    matrix = nn.init.normal_(torch.empty(sizes.vocabulary, sizes.width), std=sizes.width**-0.5)
    each = -(-sizes.vocabulary // dist.get_world_size())
    model.head.weight = nn.Parameter(matrix[dist.get_rank() * each :][:each].clone())
    return model.to(device)


def loss_of(model: LanguageModel, tokens: Tensor, vocabulary: int) -> Tensor:
    with precision(tokens.device):
        return partita.parallel.linear_cross_entropy(
            model(tokens)[:, :-1], model.head.weight, tokens[:, 1:], classes=vocabulary
        )


def body(model: LanguageModel) -> list[nn.Parameter]:
    """Return the parameters that every rank has."""
    return [parameter for parameter in model.parameters() if parameter is not model.head.weight]


def clip(model: LanguageModel, limit: float) -> None:
    """Scale all gradients down to a common norm.

    The rows of the head of all ranks contribute to the norm. If each rank clipped by a norm of its
    own, the ranks would drift apart.
    """
    square = model.head.weight.grad.square().sum()
    dist.all_reduce(square)
    norm = (
        square + nn.utils.get_total_norm([parameter.grad for parameter in body(model)]).square()
    ).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)


def train(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    pieces: Iterator[Tensor],
    vocabulary: int,
    steps: int,
    quiet: bool,
) -> Training:
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.64 / model.head.in_features, total_steps=steps
    )
    training = Training([], [])
    with training_bar(quiet or dist.get_rank() > 0) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"))
        for _, tokens in zip(range(steps), pieces, strict=False):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_of(model, tokens, vocabulary)
            loss.backward()
            clip(model, 1.0)
            optimizer.step()
            schedule.step()
            training.losses.append(loss.item())  # waits for the whole step
            training.milliseconds.append(1e3 * (time.perf_counter() - start))
            progress.update(task, advance=1, loss=training.losses[-1])
    return training


def describe(model: LanguageModel, optimizer: torch.optim.Optimizer) -> Rank:
    head = model.head.weight
    tensors = [head, head.grad, *(state for state in optimizer.state[head].values() if state.ndim)]
    bits = [parameter.detach().view(torch.int32) for parameter in body(model)]
    checksum = [int(integers.sum()) for integers in bits]
    return Rank(checksum, len(head), sum(tensor.nbytes for tensor in tensors) / 2**20)


def run(sizes: Sizes, steps: int, seed: int, device: torch.device, quiet: bool = False) -> Report:
    data = shared_text(sizes, seed, device)
    model = build(sizes._replace(vocabulary=data.vocabulary), seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    pieces = batches(data.tokens, sizes, torch.Generator().manual_seed(seed), device)
    training = train(model, optimizer, pieces, data.vocabulary, steps, quiet)
    ranks: list[Rank] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, describe(model, optimizer))
    return Report(training, ranks)


def progress_of(losses: list[float]) -> str:
    """Return the loss of the first and of the last batches; the two never share a batch."""
    size = min(REPORTED_BATCHES, len(losses) // 2)
    if size == 0:
        return f"Loss: {losses[0]:.3f} nats a token in the only batch"
    batches = "batch" if size == 1 else f"{size} batches"
    return (
        f"Loss: {statistics.mean(losses[:size]):.3f} nats a token in the first {batches},"
        f" {statistics.mean(losses[-size:]):.3f} in the last"
    )


def write(path: Path, losses: list[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("batch", "loss"), *enumerate(losses, 1)])


def draw(path: Path, losses: list[float], where: str) -> None:
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color=BLUE, lw=1)
    axes.set_title("Loss of a token, nats", size=11, weight="bold", color=INK)
    axes.set(xlabel=f"batch\n{where}")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if known else "png")


def main(argv: Sequence[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description="Train a language model with its vocabulary spread over the processes that"
        " torchrun starts."
    )
    parser.add_argument(
        "--batches", type=positive, default=200, help="batches to train on (default 200)"
    )
    for name, value in (ON_GPU if gpu else ON_CPU)._asdict().items():
        parser.add_argument(
            f"--{name}",
            type=positive,
            default=value,
            help=f"{'of text' if name == 'megabytes' else 'of the model'} (default {value})",
        )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument("--csv", type=Path, help="table of the loss of each batch to write")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("train_parallel.png"),
        help="picture to write (default train_parallel.png)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)

    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    device = join()
    report = run(sizes, options.batches, options.seed, device, options.quiet)
    first, world = dist.get_rank() == 0, dist.get_world_size()
    dist.barrier()  # no rank leaves while another still communicates
    dist.destroy_process_group()
    if first:
        losses, milliseconds = report.training
        print(progress_of(losses))
        print(f"A step: {statistics.median(milliseconds):,.0f} ms")
        for i, rank in enumerate(report.ranks):
            print(
                f"Head on rank {i}: {rank.rows:,} rows,"
                f" {rank.mebibytes:,.1f} MiB with gradient and optimizer"
            )
        ranks = f"{world} {'rank' if world == 1 else 'ranks'}"
        print(f"Transformer: {'equal' if report.equal else 'not equal'} on {ranks}")
        where = f"{torch.cuda.get_device_name()}, NCCL" if gpu else "CPU, Gloo"
        classes = sum(rank.rows for rank in report.ranks)
        batch = f"{sizes.batch} × {sizes.length} tokens, {classes:,} classes"
        draw(options.out, losses, f"{where}, {ranks}: {batch}")
        print(f"Picture: {options.out}")
        if options.csv:
            write(options.csv, losses)
    return not report.equal


if __name__ == "__main__":
    sys.exit(main())
