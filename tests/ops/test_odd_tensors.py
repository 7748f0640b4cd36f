"""Tensors that no op serves: each op refuses them with one error that names the argument."""

from collections.abc import Callable

import pytest
import torch
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
