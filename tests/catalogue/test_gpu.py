"""Every call on a GPU: the same bits, replayed, captured, on any stream and device; no waits."""

import pytest
import torch
from helpers.catalogue import each_call, outcome, same_bits
from helpers.memory import no_waits
from torch import Tensor
from torch.utils._pytree import tree_leaves

from partita.cli import info
from partita.runtime.caches import clear_caches
from partita.runtime.register import LEFT_TO_PYTHON
from partita.testing.samples import CALLS, Draw, Sample

pytestmark = pytest.mark.gpu
# Best paths of a number that the user names, samples from a generator, the edges that leave a
# state, and the number of rows without recorded classes need the host.
HOST_NAMES = ("nbest", "sample", "backward_scores", "linear_support_stats")
ON_THE_HOST = [name for name in CALLS if name.endswith(HOST_NAMES)]
CAPTURED = [name for name in CALLS if name not in ON_THE_HOST]

IN_PYTORCH = "PyTorch's own functions serve it"
# The log-probability of all other classes is computed in PyTorch.
WITH_REST = "logprobs: it calls aten.fill_.Tensor; logprobs_backward: it calls aten.clone.default"
# PyTorch checks the offsets of recorded supports, and sorts their ids.
SORTED = "support_sets: it calls aten.lt.Tensor"
# The matrix products of its chunks, and its test for gradients of zero, are PyTorch's.
PRODUCTS = "contrastive_state: it calls aten.mm.out; contrastive_gradient: it calls aten.eq.Scalar"
# What `partita info --replay` says of the calls that are not replayed, or of which a part is not.
EXCEPTIONS = {
    "support_stats": SORTED,
    "linear_support_stats": SORTED,
    "contrastive_loss": PRODUCTS,
    "topk_divergence": WITH_REST,
    "linear_topk_divergence": WITH_REST,
    "Chain.nbest": IN_PYTORCH,
    "Chain.forward_scores": IN_PYTORCH,  # which have no kernel for their gradient
    "Chain.backward_scores": IN_PYTORCH,
    "LinearChain.nbest": IN_PYTORCH,
    # A list says which gradients are wanted. The joint of each chunk is a product of matrices.
    "linear_rnnt_loss": f"linear_rnnt: {LEFT_TO_PYTHON}",
    "linear_tdt_loss": f"linear_rnnt: {LEFT_TO_PYTHON}",
}


def samples(name: str, device: str = "cuda", seed: int = 0) -> list[Sample]:
    """Return a small call, a reduced one, and one of the size that `partita check` has."""
    call, draw = CALLS[name], Draw(device=device, seed=seed)
    options = [option for option in ("mean", "all options") if option in call.options]
    found = [call.sample(draw), *(call.sample(draw, option) for option in options)]
    return [*found, *(call.sample(draw, sizes=sizes, name="large") for sizes in call.checked[-1:])]


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(same_bits(found[part].to(truth.device), truth) for part, truth in expected.items())


def copy_inputs(to: Sample, other: Sample) -> None:
    with torch.no_grad():
        for value, new in zip(tree_leaves(to.inputs), tree_leaves(other.inputs), strict=True):
            if isinstance(value, Tensor):
                value.copy_(new)


@each_call
def test_replays_and_second_runs_have_the_bits_of_the_plain_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sample in samples(name):
        monkeypatch.setenv("PARTITA_REPLAY", "0")
        expected = outcome(sample)
        monkeypatch.delenv("PARTITA_REPLAY")
        assert all(equal(outcome(sample), expected) for _ in range(4)), sample


@pytest.mark.parametrize("name", CAPTURED)
def test_capture_and_replay(name: str) -> None:
    for sample, other in zip(samples(name), samples(name, seed=1), strict=True):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            outcome(sample)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = sample.run()
            captured = [*results, *sample.gradients(results).values()]
        copy_inputs(sample, other)
        graph.replay()
        graph.replay()
        for found, truth in zip(captured, outcome(other).values(), strict=True):
            assert same_bits(found.detach(), truth), sample


@pytest.mark.parametrize("name", CAPTURED)
def test_no_synchronisation_with_the_host(name: str) -> None:
    for sample in samples(name):
        sample.gradients(sample.run())
        with no_waits():
            sample.gradients(sample.run())


@each_call
def test_runs_on_the_current_stream(name: str) -> None:
    for sample in samples(name):
        expected = outcome(sample)
        late = sample.with_inputs(lambda x: torch.zeros_like(x, requires_grad=x.requires_grad))
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            copy_inputs(late, sample)
            results = late.run()
            found = [*results, *late.gradients(results).values()]
        stream.synchronize()
        for ours, truth in zip(found, expected.values(), strict=True):
            assert same_bits(ours.detach(), truth), sample


@pytest.mark.multigpu
@each_call
def test_tensors_on_a_device_that_is_not_the_current_one(name: str) -> None:
    assert torch.cuda.current_device() == 0
    for near, far in zip(samples(name), samples(name, "cuda:1"), strict=True):
        expected = outcome(near)
        for _ in range(4):
            found = outcome(far)
            assert {x.device for x in found.values()} == {torch.device("cuda:1")}
            assert equal(found, expected), far
    assert torch.cuda.current_device() == 0


@pytest.mark.long
def test_each_call_is_replayed_or_known_not_to_be() -> None:
    clear_caches()  # which forgets calls that other tests made while a graph was captured
    lines = info.all_replays()
    found = {line.call: line.reason for line in lines if line.replayed != "yes"}
    table = "\n".join(f"{line.call:36}{line.replayed:8}{line.reason}" for line in lines)
    assert found == EXCEPTIONS, f"the list of exceptions and this table differ:\n{table}"
