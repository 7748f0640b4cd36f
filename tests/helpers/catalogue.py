"""The catalogue of calls as parameters of tests."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.rows import INTERPRETING
from helpers.shard_calls import SHARDS
from torch import Tensor

import partita
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw, Sample

BACKEND = "triton" if INTERPRETING else "auto"
EVERY = {**CALLS, **SHARDS}
each_call = pytest.mark.parametrize("name", CALLS)
# These are no ops but PyTorch's own.
COMPOSED = {name for name in CALLS if name.endswith(("nbest", "_scores"))}
COMPOSED -= {"SemiMarkovChain.nbest"}  # which has kernels
# PyTorch's functions serve these on a CPU by default.
NATIVE = {"softmax", "log_softmax", "cross_entropy", "linear_cross_entropy"}
with partita.backend("reference"):
    DIFFERENTIABLE = [
        name
        for name, call in CALLS.items()
        if any(r.requires_grad for r in call.sample(Draw()).run())
    ]

# The kinds of calls that have autograd functions of their own.
KINDS = (
    *("probabilities, all options", "lean", "bias, all options, lean", "bias, beta 1, lean"),
    *("low rank, lean", "sigmoid, lean"),
)
VARIANTS = {name: (name, "") for name in DIFFERENTIABLE} | {
    f"{name}, {kind}": (name, kind)
    for name in DIFFERENTIABLE
    for kind in KINDS
    if kind in CALLS[name].options
}


def all_samples(name: str, draw: Draw) -> Iterator[Sample]:
    """Yield the samples of a call; few in the interpreter, which takes seconds for each."""
    call = EVERY[name]
    if not INTERPRETING:
        yield from call.samples(draw)
        return
    yield call.sample(draw)
    for size in call.empty:
        yield call.sample(draw, sizes={size: 0}, name=f"no {size}")


def outcome(sample: Sample) -> dict[str, Tensor]:
    """Return the results and gradients of a sample by name, on poisoned memory."""
    with poisoned_memory():
        results = sample.run()
        found = sample.gradients(results)
    return {**{f"result {i}": result.detach() for i, result in enumerate(results)}, **found}


def in_places(names: Iterable[str], **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test by the name of a call or variant, the device and the backend.

    The reference on a GPU is PyTorch's own code there. On a CPU it serves by default what neither
    Numba's kernels nor PyTorch's functions serve.
    """
    cases: list[Any] = []
    for name in names:
        call, _ = VARIANTS.get(name, (name, ""))
        is_other = INTERPRETING or EVERY[call].numba or call in NATIVE
        cases += [(name, "cpu", each) for each in (BACKEND, "reference")[: 1 + is_other]]
        cases.append(pytest.param(name, "cuda", BACKEND, marks=pytest.mark.gpu))
    return pytest.mark.parametrize(("name", "device", "backend"), cases, **options)


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Make the group of one process in which the sharded calls run."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_score(x: object) -> bool:
    """Return whether an input is a tensor of floating numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, NaN at the same places included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
