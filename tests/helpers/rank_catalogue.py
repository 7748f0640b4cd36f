"""The sharded calls of the catalogue beside those of all classes in fp64, which every rank runs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from helpers.rank_data import (
    CLASSES,
    HIDDEN,
    TOKENS,
    assert_close,
    assert_same_on_all_ranks,
    local_shard,
    shard_sizes,
)
from helpers.shard_calls import SHARDS
from torch import Tensor

import partita
from partita.ops.linear_heads.plan import low_rank_bytes
from partita.testing.samples import CALLS, Draw, Sample

# The dimension of the classes in each input that the ranks share.
SHARDED = {"linear_weight": 0, "linear_bias": 0, "teacher_weight": 0, "teacher_logits": 1}
SHARDED |= {"low_rank_weight": 0}


def samples(name: str, draw: Draw) -> Iterator[Sample]:
    """Yield each sample of a call, and some with another option or a leading dimension."""
    sizes = {"rows": TOKENS, "classes": CLASSES, "hidden": HIDDEN}
    for option in ("", *SHARDS[name].options):
        sample = SHARDS[name].sample(draw, option, sizes)
        if "memory_budget" in sample.inputs:
            sample.inputs["memory_budget"] = 800 * TOKENS
            if "low rank" in option:
                sample.inputs["memory_budget"] += low_rank_bytes(3, TOKENS, CLASSES, draw.dtype)
        if "linear_weight" in sample.inputs:
            sample.inputs.setdefault("linear_bias", draw.scores(CLASSES, plain=True))
        if "teacher_logits" in sample.inputs:
            for logits in ("logits", "teacher_logits"):
                sample.inputs[logits].detach()[2, :20] = -torch.inf
        yield sample
        changes: list[dict[str, Any]] = []
        if "weight" in sample.inputs:
            changes = [{"weight": None}, {"label_smoothing": 0.0}]
        elif name == "parallel.token_stats":
            changes = [{"temperature": 0.7}]
        elif name == "parallel.linear_divergence" and option == "no mask":
            hidden = {part: sample.inputs[part] for part in ("input", "teacher_input")}
            changes = [{part: x.unsqueeze(0).detach() for part, x in hidden.items()}]
        for change in changes:
            yield replace(sample, inputs={**sample.inputs, **change})


def shard(sample: Sample, sizes: tuple[int, ...]) -> tuple[Sample, dict[str, int]]:
    """Return this rank's sample, and the dimension of the classes of the inputs that are shared."""
    first = {} if "linear_weight" in sample.inputs else {"input": 1, "logits": 1}
    dims = {name: dim for name, dim in (first | SHARDED).items() if name in sample.inputs}

    def part(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        part = local_shard(x.detach(), sizes, dims[name]) if name in dims else x.detach()
        return part.clone().requires_grad_(x.requires_grad)

    inputs = {name: part(name, x) for name, x in sample.inputs.items()}
    return replace(sample, inputs=inputs), dims


def check_catalogue(device: torch.device) -> None:
    """Compare results and gradients, which are the same on all ranks where nothing is shared."""
    world = dist.get_world_size()
    for name in SHARDS:
        whole = CALLS[name.removeprefix("parallel.")]
        dtypes = (torch.float32, torch.bfloat16) if "linear" in name else (torch.float32,)
        for dtype in dtypes:
            for sample in samples(name, Draw(dtype, device=device)):
                exact = replace(sample, call=whole).to(torch.float64)
                with partita.backend("reference"):
                    truth = exact.run()
                    gradients = exact.gradients(truth)
                for i, sizes in enumerate(shard_sizes(world)):
                    local, dims = shard(sample, sizes)
                    results = local.run(classes=CLASSES if i == 0 else sizes)
                    for found, expected in zip(results, truth, strict=True):
                        if found.is_floating_point() or dtype == torch.float32:
                            # Classes that differ in fp64 may tie in bf16.
                            assert_close(found, expected, sample.inputs.get("logits_dtype", dtype))
                        assert_same_on_all_ranks(found.detach())
                    for part, found in local.gradients(results).items():
                        full = expected = gradients[part]
                        if part in dims:
                            expected = local_shard(full, sizes, dims[part])
                        else:
                            assert_same_on_all_ranks(found)
                        assert_close(found, expected, dtype, full)
