"""Tensors that no op serves: each op refuses them with one error that names the argument."""

from collections.abc import Callable

import pytest
import torch
from helpers.rows import INTERPRETING
from torch import Tensor

import partita
from partita.integrations.transformers import causal_lm_loss, linear_causal_lm_loss

DENSE = "expected a dense Tensor, got "
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "float8_e4m3fn": (
        lambda x: x.to(torch.float8_e4m3fn),
        "expected float16, bfloat16, float32 or float64, got torch.float8_e4m3fn",
    ),
    "float8_e5m2": (
        lambda x: x.to(torch.float8_e5m2),
        "expected float16, bfloat16, float32 or float64, got torch.float8_e5m2",
    ),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[0]]), f"{DENSE}a nested one"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
        f"{DENSE}a nested one",
    ),
    "sparse": (lambda x: x.to_sparse(), f"{DENSE}one of layout torch.sparse_coo"),
    "csr": (lambda x: x.flatten(0, -2).to_sparse_csr(), f"{DENSE}one of layout torch.sparse_csr"),
    "mkldnn": (lambda x: x.to_mkldnn(), f"{DENSE}one of layout torch._mkldnn"),
    "masked": (
        lambda x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
        f"{DENSE}a MaskedTensor",
    ),
    "complex": (
        lambda x: x.to(torch.complex64),
        "expected a floating dtype, got torch.complex64",
    ),
}
LABELS, TARGETS = torch.arange(4), torch.ones(2, 2, dtype=torch.int64)
CTC = (TARGETS, [6, 6], [2, 2])
CRF = {"state_len": 1, "alphabet_size": 3}
DENSE_SOURCE = partita.dense_source(2)
# The shape of the odd tensor, the name of its argument, and a call that takes it.
CALLS: dict[str, tuple[tuple[int, ...], str, Callable[[Tensor], object]]] = {
    "softmax": ((4, 5), "input", partita.softmax),
    "log_softmax, dtype": (
        (4, 5),
        "input",
        lambda x: partita.log_softmax(x, dtype=torch.float32),
    ),
    "logsumexp": ((4, 5), "input", partita.logsumexp),
    "cross_entropy": ((4, 5), "input", lambda x: partita.cross_entropy(x, LABELS)),
    "cross_entropy, weight": (
        (5, 5),
        "weight",
        lambda x: partita.cross_entropy(torch.zeros(4, 5), LABELS, x),
    ),
    "token_stats": ((4, 5), "logits", partita.token_stats),
    "linear_cross_entropy, input": (
        (4, 5),
        "input",
        lambda x: partita.linear_cross_entropy(x, torch.zeros(7, 5), LABELS),
    ),
    "linear_cross_entropy, weight": (
        (7, 5),
        "linear_weight",
        lambda x: partita.linear_cross_entropy(torch.zeros(4, 5), x, LABELS),
    ),
    "linear_token_stats": ((4, 5), "input", lambda x: partita.linear_token_stats(x, x, LABELS)),
    "ctc_loss": ((6, 2, 5), "log_probs", lambda x: partita.ctc_loss(x, *CTC)),
    "ctc_align": ((6, 2, 5), "log_probs", lambda x: partita.ctc_align(x, *CTC)),
    "ctc_greedy_search": ((6, 2, 5), "log_probs", partita.ctc_greedy_search),
    "ctc_beam_search": ((6, 2, 5), "log_probs", partita.ctc_beam_search),
    "ctc_crf_decode": (
        (6, 2, 6),
        "scores",
        lambda x: partita.ctc_crf_decode(x, **CRF),
    ),
    "ctc_crf_loss": (
        (6, 2, 6),
        "scores",
        lambda x: partita.ctc_crf_loss(x, TARGETS, [2, 2], **CRF),
    ),
    "logz": ((3, 2, 2, 2), "scores", lambda x: partita.logz(x, DENSE_SOURCE)),
    "logz, initial": (
        (2, 2),
        "initial",
        lambda x: partita.logz(torch.zeros(3, 2, 2, 2), DENSE_SOURCE, x),
    ),
    "linear_chain": (
        (3, 2, 2),
        "emissions",
        lambda x: partita.linear_chain(x, torch.zeros(2, 2)),
    ),
    "causal_lm_loss": ((4, 5), "logits", lambda x: causal_lm_loss(x, LABELS, 5)),
    "linear_causal_lm_loss": (
        (4, 5),
        "hidden_states",
        lambda x: linear_causal_lm_loss(x, torch.zeros(7, 5), LABELS),
    ),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch calls some of these kinds prototypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_each_op_refuses_it_by_name(name: str, kind: str) -> None:
    make, message = KINDS[kind]
    shape, argument, call = CALLS[name]
    x = make(torch.rand(shape))
    with pytest.raises(TypeError) as raised:
        call(x)
    assert str(raised.value) == f"{argument}: {message}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_target_probabilities(kind: str) -> None:
    make, _ = KINDS[kind]
    with pytest.raises(TypeError, match=r"^target: expected "):
        partita.cross_entropy(torch.zeros(4, 5), make(torch.rand(4, 5)))


@pytest.mark.parametrize("kind", ["nested", "jagged", "sparse"])
@pytest.mark.filterwarnings("ignore")
def test_integers(kind: str) -> None:
    make, message = KINDS[kind]
    odd = make(torch.ones(2, 2, dtype=torch.int64))
    x = torch.zeros(6, 2, 5)
    with pytest.raises(TypeError, match=f"^targets: {message}$"):
        partita.ctc_loss(x, odd, [6, 6], [2, 2])
    with pytest.raises(TypeError, match=f"^target_lengths: {message}$"):
        partita.ctc_loss(x, TARGETS, [6, 6], odd)
    with pytest.raises(TypeError, match=f"^source: {message}$"):
        partita.logz(torch.zeros(3, 2, 2, 2), odd)
    with pytest.raises(TypeError, match=f"^target: {message}$"):
        partita.token_stats(torch.zeros(2, 2, 5), odd)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, requires_grad=True)


NONE, EMPTY = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64)
SIZES = {"state_len": 2, "alphabet_size": 5}
NO_SEQUENCES: dict[str, Callable[[], object]] = {
    "Chain": lambda: partita.Chain(zeros(4, 0, 3, 3), partita.dense_source(3), lengths=NONE),
    "LinearChain": lambda: partita.linear_chain(zeros(4, 0, 3), zeros(3, 3), lengths=NONE),
    "LinearChain without states": lambda: partita.linear_chain(zeros(4, 2, 0), zeros(0, 0)),
    "SemiMarkovChain": lambda: partita.semi_markov_chain(zeros(4, 0, 3), zeros(3, 3), zeros(2, 3)),
    "ctc_loss": lambda: partita.ctc_loss(zeros(4, 0, 3), EMPTY, NONE, NONE, reduction="sum"),
    "ctc_align": lambda: partita.ctc_align(zeros(4, 0, 3), EMPTY, NONE, NONE),
    "ctc_crf_loss": lambda: partita.ctc_crf_loss(
        zeros(4, 0, 80), EMPTY, NONE, **SIZES, reduction="sum"
    ),
    "ctc_beam_search": lambda: partita.ctc_beam_search(zeros(4, 0, 3), NONE),
    "ctc_greedy_search": lambda: partita.ctc_greedy_search(zeros(4, 0, 3), NONE),
    **{
        f"ctc_crf_decode, {method}": lambda method=method: partita.ctc_crf_decode(
            zeros(4, 0, 80), **SIZES, method=method
        )
        for method in ("viterbi", "posterior", "beam")
    },
    "rnnt_loss": lambda: partita.rnnt_loss(
        zeros(0, 4, 3, 5), EMPTY, NONE, NONE, 0, reduction="sum"
    ),
    "rnnt_align": lambda: partita.rnnt_align(zeros(0, 4, 3, 5), EMPTY, NONE, NONE, 0),
    "tdt_loss": lambda: partita.tdt_loss(
        zeros(0, 4, 3, 5), zeros(0, 4, 3, 2), EMPTY, NONE, NONE, 0, [0, 1], reduction="sum"
    ),
}


@pytest.mark.parametrize(
    "backend",
    [
        "auto",
        "reference",
        pytest.param(
            "triton",
            marks=[
                pytest.mark.interpreted,
                pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("name", NO_SEQUENCES)
def test_no_sequences(name: str, backend: str) -> None:
    with partita.backend(backend):
        found = NO_SEQUENCES[name]()
        if "Chain" in name:
            chain = found
            assert chain.viterbi().score.shape == chain.sample(2).states.shape[2:]
            found = chain.logz().sum() + chain.entropy().sum()
        if isinstance(found, torch.Tensor):
            found.backward()
        else:
            assert all(len(field) == 0 for field in found if isinstance(field, torch.Tensor))
