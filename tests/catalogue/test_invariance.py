"""The bits of a row or sequence depend on that row alone, and not on its batch.

Linear heads have `partita.batch_invariant()` for this, in which these tests run.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers.catalogue import BACKEND, all_samples, outcome, same_bits
from helpers.invariance import BATCHES, DRAWN, LAYOUTS, differences
from helpers.rows import INTERPRETING, devices

import partita
from partita.testing.samples import CALLS, Draw, Sample, heads, rows

WIDE = [call.name for call in rows.CALLS]
HEADS = [call.name for call in heads.CALLS]
NAMES = [name for name, call in CALLS.items() if call.batch and name not in DRAWN]
if INTERPRETING:  # Blocks of 1,024 tokens take long there, and heads have the same kernels.
    NAMES = [name for name in NAMES if name not in HEADS[1:]]
OF_HEADS = ("", "bias, all options", "all options", "sum, lean", "beta 0.5, all options")

ATEN = "ATen adds up rows in another order by their number, their place or their stride"
PRODUCTS = "the kernel of a product depends on the number of its rows"
# What does not hold yet. A function that is mended leaves the table, or its test fails.
BROKEN = {
    "cpu": dict.fromkeys(("softmax", "log_softmax"), ATEN),
    "interpreted": {},
    "cuda": {"linear_tdt_loss": PRODUCTS},
}


def cases() -> Iterator[object]:
    for name in NAMES:
        for device in ("cpu", "cuda"):
            reason = BROKEN["interpreted" if INTERPRETING and device == "cpu" else device].get(name)
            marks = [pytest.mark.gpu] * (device == "cuda")
            marks += [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(name, device, marks=marks)


def samples(name: str, device: str) -> Iterator[Sample]:
    """Yield calls of rows of 781 classes, which start anywhere, and of small sequences."""
    call, draw = CALLS[name], Draw(device=device)
    if name in HEADS:
        options = (*OF_HEADS, "probabilities", "fp32 logits")
        for option in options[: 1 if INTERPRETING else None]:
            half = Draw(torch.bfloat16, device=device) if "fp32" in option else draw
            if option in ("", *call.options):
                sample = call.sample(half, option)
                if "memory_budget" in sample.inputs:  # in chunks of classes too
                    sample.inputs["memory_budget"] = 2**23 if "lean" in option else 2**24
                yield sample
        return
    if name in WIDE:
        yield call.sample(draw, sizes={"rows": 5, "classes": 781}, name="781 classes")
    if device == "cuda":
        yield call.sample(draw)
    else:
        yield from all_samples(name, draw)


@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "device"), cases())
def test_rows_and_sequences_have_bits_of_their_own(name: str, device: str) -> None:
    """They are the same alone as in each batch, in each place, and wherever rows start."""
    # As users have it: PyTorch serves small batches.
    batches = BATCHES if device == "cuda" else (1, 2, 7) if INTERPRETING else (1, 2, 7, 33)
    layouts = ("", "odd start") if name in HEADS else tuple(LAYOUTS)
    with partita.backend(BACKEND), partita.batch_invariant():
        wrong = [
            f"{sample}: {found}"
            for sample in samples(name, device)
            for found in differences(sample, batches, layouts)
        ]
    assert not wrong


@devices
@pytest.mark.parametrize("name", HEADS)
def test_compiled_replayed_and_captured_heads_have_the_bits_of_eager_ones(
    name: str, device: str
) -> None:
    """In the mode; other tests of the catalogue compare all other calls."""
    torch._dynamo.reset()
    with partita.batch_invariant():
        for sample in samples(name, device):
            expected = outcome(sample)
            compiled = torch.compile(sample.call.function, fullgraph=True, backend="aot_eager")
            found = [outcome(replace(sample, call=replace(sample.call, function=compiled)))]
            if device == "cuda":
                found += [outcome(sample) for _ in range(3)]
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    results = sample.run()
                    gradients = sample.gradients(results).values()
                graph.replay()
                captured = (*(result.detach() for result in results), *gradients)
                found.append(dict(zip(expected, captured, strict=True)))
            of_rows = {part for part in expected if not part.startswith("linear_")}  # no sums
            for each in found:
                assert all(same_bits(each[part], expected[part]) for part in of_rows), sample


def test_the_comparison_finds_a_sum_over_the_batch() -> None:
    """A function whose rows depend on their number, or on their place, is found."""

    def by_number(input: torch.Tensor, **_: object) -> torch.Tensor:
        return input * len(input)

    def by_place(input: torch.Tensor, **_: object) -> torch.Tensor:
        return input + torch.arange(len(input))[:, None]

    sample = CALLS["softmax"].sample(Draw())
    for function in (by_number, by_place):
        changed = replace(sample, call=replace(sample.call, function=function, name="changed"))
        assert any("result 0" in found for found in differences(changed, (1, 2, 7)))
