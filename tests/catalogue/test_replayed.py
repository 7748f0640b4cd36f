"""Each call on a GPU is replayed, or is known not to be, with the reason that is reported."""

import pytest

from partita.cli import info
from partita.runtime.caches import clear_caches
from partita.runtime.register import LEFT_TO_PYTHON

IN_PYTORCH = "PyTorch's own functions serve it"
# The log-probability of all other classes is computed in PyTorch.
WITH_REST = "logprobs: it calls aten.fill_.Tensor; logprobs_backward: it calls aten.clone.default"
# What `partita info --replay` says of the calls that are not replayed, or of which a part is not.
EXCEPTIONS = {
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


@pytest.mark.gpu
@pytest.mark.long
def test_each_call_is_replayed_or_known_not_to_be() -> None:
    clear_caches()  # which forgets calls that other tests made while a graph was captured
    lines = info.all_replays()
    found = {line.call: line.reason for line in lines if line.replayed != "yes"}
    table = "\n".join(f"{line.call:36}{line.replayed:8}{line.reason}" for line in lines)
    assert found == EXCEPTIONS, f"the list of exceptions and this table differ:\n{table}"


def test_the_exceptions_are_calls_of_the_catalogue() -> None:
    assert set(EXCEPTIONS) <= set(info.CALLS)
