"""Whether the bits of a row or sequence depend on the batch in which it is computed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.testing.samples import Call, Sample, map_tensors

BATCHES = (1, 2, 7, 33, 132, 133, 264, 1000, 4096)
# Functions whose rows are those of the last dimension, whatever the number of dimensions before it.
LEADING = (
    *("softmax", "log_softmax", "logsumexp", "token_stats", "logprobs", "topk_logprobs"),
    *("divergence", "topk_divergence", "linear_cross_entropy", "linear_token_stats"),
    *("linear_logprobs", "linear_topk_logprobs", "linear_divergence", "linear_topk_divergence"),
    *("support_stats", "linear_support_stats", "truncated_stats", "linear_truncated_stats"),
    *("distillation_loss", "linear_distillation_loss"),
)
# Inputs that may have a number for each row.
OF_ROWS = tuple((name, 1, 0) for name in ("top_k", "top_p", "min_p", "temperature"))
# The numbers that a sample is drawn from are drawn for the whole batch.
DRAWN = ("Chain.sample", "LinearChain.sample", "SemiMarkovChain.sample")
Outcome = dict[str, Tensor]


class Rows(NamedTuple):
    """Where the rows or sequences of a sample lie.

    Fields:
        inputs: the dimension that counts rows in each input that has one.
        results: that dimension in each result, or nothing if results are sums over the batch.
    """

    inputs: Mapping[str, int]
    results: Sequence[int]


def rows_of(sample: Sample) -> Rows | None:
    """Return where the rows of a sample lie, or None if no bits belong to one row."""
    call, inputs = sample.call, sample.inputs
    if not call.batch or call.name in DRAWN or inputs.get("reduction") == "mean":
        return None
    batch = dict(call.batch)
    for name, ndim, dim in (("transitions", 4, 1), ("mask", 2, 1), *OF_ROWS):
        if isinstance(inputs.get(name), Tensor) and inputs[name].ndim == ndim:
            batch[name] = dim
    target = inputs.get("target")
    if isinstance(target, Tensor) and target.ndim == 0:  # one row without a batch
        return None
    if "targets" in batch and inputs["targets"].ndim == 1:  # concatenated
        return None
    results: Sequence[int] = call.rows
    if "dim" in inputs and inputs["dim"] != -1:
        if inputs["dim"] != 0:
            return None
        batch, results = {"input": 1}, (0,) if call.name == "logsumexp" else (1,)
    if sample.reduced:
        results = ()
    elif not results:
        results = (0,) * len(sample.run())
    return Rows({name: dim for name, dim in batch.items() if inputs.get(name) is not None}, results)


def number_of_rows(sample: Sample, rows: Rows) -> int:
    for name, dim in rows.inputs.items():
        if isinstance(sample.inputs[name], Tensor):
            return int(sample.inputs[name].shape[dim])
    raise AssertionError(sample)


def of_rows(
    sample: Sample, rows: Rows, index: Sequence[int], layout: Callable[[Tensor], Tensor]
) -> Sample:
    """Return the call for these rows of a sample, which may be repeated."""
    inputs = dict(sample.inputs)
    if "offsets" in inputs:  # where the ids of each row begin
        offsets = inputs["offsets"].cpu()
        numbers = offsets.diff().view(number_of_rows(sample, rows), -1)
        lists = inputs["ids"].tensor_split(numbers.sum(1).cumsum(0)[:-1])
        inputs["ids"] = torch.cat([lists[i] for i in index])
        chosen = torch.cat([offsets[:1], numbers[list(index)].flatten().cumsum(0)])
        inputs["offsets"] = chosen.to(inputs["offsets"].device)
    for name, dim in rows.inputs.items():
        if isinstance(inputs[name], list):
            inputs[name] = [inputs[name][i] for i in index]
            continue

        def select(x: Tensor, dim: int = dim) -> Tensor:
            chosen = x.detach().index_select(dim, torch.tensor(index, device=x.device))
            chosen = layout(chosen) if x.is_floating_point() else chosen
            return chosen.requires_grad_(x.requires_grad)

        inputs[name] = map_tensors(select, inputs[name])
    return replace(sample, inputs=inputs)


def outcome_of_rows(sample: Sample, rows: Rows, upstream: Sequence[Tensor]) -> Outcome:
    """Return results that have rows, and gradients of inputs that have rows.

    Args:
        upstream: the upstream gradient of each result that is no sum over the batch.
    """
    results = sample.run()
    found = {f"result {i}": results[i].detach() for i in range(len(rows.results))}
    wanted = [i for i, result in enumerate(results) if result.requires_grad]
    leaves = {name: x for name, x in sample.leaves.items() if name in rows.inputs}
    if not wanted or not leaves:
        return found
    grads = [
        torch.where(results[i].isfinite(), upstream[i], 0).to(results[i].dtype)
        if rows.results
        else torch.full_like(results[i], 0.7)
        for i in wanted
    ]
    gradients = torch.autograd.grad(
        [results[i] for i in wanted], list(leaves.values()), grads, materialize_grads=True
    )
    return found | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}


def dims(rows: Rows) -> dict[str, int]:
    """Return the dimension that counts rows in each part of an outcome."""
    found = {f"result {i}": dim for i, dim in enumerate(rows.results)}
    return found | {f"gradient of {name}": dim for name, dim in rows.inputs.items()}


def rows_that_differ(found: Tensor, expected: Tensor, dim: int) -> int:
    """Return in how many rows two tensors have other bits. Any NaN equals any NaN."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return int(expected.shape[dim])
    differs = found != expected
    if found.is_floating_point():
        differs &= ~(found.isnan() & expected.isnan())
        differs |= (found == 0) & (found.signbit() != expected.signbit())
    by_row = differs.movedim(dim, 0).reshape(differs.shape[dim], -1)
    return int(by_row.any(1).sum()) if differs.numel() else 0


def at_an_odd_start(x: Tensor) -> Tensor:
    """Return a contiguous copy that starts one element after a multiple of 16 bytes."""
    memory = x.new_full((x.numel() + 1,), torch.nan)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def in_longer_rows(x: Tensor) -> Tensor:
    """Return a copy whose last dimension lies in rows of three elements more, which are NaN."""
    if x.ndim < 2:
        return x
    memory = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    memory[..., : x.shape[-1]] = x
    return memory[..., : x.shape[-1]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "odd start": at_an_odd_start,
    "longer rows": in_longer_rows,
}


def in_two_dimensions(call: Call, names: Iterable[str]) -> Call:
    """Return the entry of a function with `[B, T, ...]`, not `[M, ...]`, in the named inputs."""

    def function(**inputs: Any) -> Any:
        def folded(x: Tensor) -> Tensor:
            return x.reshape(3, len(x) // 3, *x.shape[1:])

        changed = {name: map_tensors(folded, inputs[name]) for name in names}
        results = Sample(call, "", {**inputs, **changed}, torch.float32).run()
        return tuple(x.flatten(0, 1) if x.ndim > 1 else x for x in results)

    return replace(call, function=function)


def order(n: int, rows: int) -> list[int]:
    """Return n of the rows, with other neighbours and in other places for each n."""
    return [(i * (n % 5 + 1) + i // 7 + n) % rows for i in range(n)]


def differences(
    sample: Sample, batches: Sequence[int] = BATCHES, layouts: Sequence[str] = tuple(LAYOUTS)
) -> Iterator[str]:
    """Yield which part of which batch has rows whose bits are not those of a batch of one row."""
    rows = rows_of(sample)
    if rows is None or (total := number_of_rows(sample, rows)) == 0:
        return
    if (budget := sample.inputs.get("memory_budget") or 0) and budget < 2**20:
        # It is one for the tokens of the sample.
        budget *= -(-max(batches) // total)
        sample = replace(sample, inputs={**sample.inputs, "memory_budget": budget})
    results = sample.run()
    weights = [
        torch.linspace(0.5, 1.5, r.numel(), dtype=torch.float64, device=r.device)
        .reshape(r.shape)
        .to(r.dtype)
        for r in results
    ]

    def computed(index: Sequence[int], layout: str = "", call: Call | None = None) -> Outcome:
        upstream = [
            weight.index_select(dim, torch.tensor(index, device=weight.device))
            for weight, dim in zip(weights, rows.results, strict=False)
        ]
        chosen = of_rows(sample, rows, index, LAYOUTS[layout])
        return outcome_of_rows(replace(chosen, call=call or chosen.call), rows, upstream)

    alone = [computed([i]) for i in range(total)]
    expected = {
        part: torch.cat([each[part] for each in alone], dims(rows)[part]) for part in alone[0]
    }

    def compared(found: Outcome, index: Sequence[int], where: str) -> Iterator[str]:
        for part, x in found.items():
            dim = dims(rows)[part]
            truth = expected[part].index_select(dim, torch.tensor(index, device=x.device))
            if wrong := rows_that_differ(x, truth, dim):
                yield f"{part}: {wrong} of {where}"

    for n in batches:
        for layout in layouts if n in (1, 7, 132) else layouts[:1]:
            index = order(n, total)
            yield from compared(computed(index, layout), index, f"{n} {layout}".strip())
    if sample.call.name in LEADING and set(rows.inputs.values()) == {0}:
        for n in {33, 264} & set(batches):
            index, folded = order(n, total), in_two_dimensions(sample.call, rows.inputs)
            yield from compared(computed(index, call=folded), index, f"{n} as [3, {n // 3}]")
