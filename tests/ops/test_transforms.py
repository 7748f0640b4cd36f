"""Batched and functional gradients of all ops, and tensors whose memory does not hold their values.

Each result is compared with one plain backward pass per gradient.
"""

from collections.abc import Callable

import pytest
import torch
from helpers.rows import devices
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import partita

N = 2  # sequences, or rows
LABELS = torch.tensor([1, 3])
ALL = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return random fp64 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


MATRIX = numbers(5, 4, seed=1)
TEACHER = numbers(N, 5, seed=7)
TEACHER_MATRIX = numbers(5, 5, seed=8)
IDS = torch.arange(2 * N).view(N, 2) % 3  # some rows repeat a class
OTHER = numbers(3, N, 3, 3, seed=5)
MOVES = numbers(3, 3, seed=9)
TOKENS = numbers(4, N, 3, seed=10)


def best_of(device: torch.device) -> partita.TopK:
    """Return the two most probable classes of the teacher."""
    return partita.TopK(*(field.to(device) for field in partita.topk_logprobs(TEACHER, 2)))


def chain(scores: Tensor) -> partita.Chain:
    """Return chains of 3 states with lengths 3 and 2."""
    source = torch.tensor([[0, 1, 2], [1, 0, 0], [2, 1, -1]], device=scores.device)
    return partita.Chain(scores, source, lengths=[3, 2])


def crf(scores: Tensor, reduction: str) -> Tensor:
    targets = torch.tensor([[1, 2, 2], [2, 1, 0]], device=scores.device)
    sizes = {"state_len": 1, "alphabet_size": 3}
    return partita.ctc_crf_loss(scores, targets, [3, 2], **sizes, reduction=reduction)


def segments(scores: Tensor) -> partita.SemiMarkovChain:
    """Return semi-Markov chains of 3 states and segments of up to 2 steps."""
    others = (MOVES.to(scores.device), MOVES[:2].to(scores.device))
    return partita.SemiMarkovChain(scores, *others, lengths=[4, 3])


def tags(scores: Tensor) -> partita.LinearChain:
    """Return dense chains of 3 states with lengths 4 and 3, whose ends have scores too."""
    moves = MOVES.to(scores.device)
    return partita.linear_chain(scores, moves, moves[0], 0.5 * scores[0], lengths=[4, 3])


def ctc(scores: Tensor, **options: object) -> Tensor:
    """Return the loss of a repeated label and of a target that has no alignment."""
    targets = torch.tensor([[1, 1], [2, 2]], device=scores.device)
    return partita.ctc_loss(scores, targets, [4, 2], [2, 2], **options)


def rnnt(logits: Tensor, **options: object) -> Tensor:
    targets, lengths = torch.tensor([[1, 2], [2, 2]], device=logits.device), ([3, 2], [2, 1])
    return partita.rnnt_loss(logits, targets, *lengths, blank=0, **options)


def tdt(logits: Tensor, **options: object) -> Tensor:
    """Return the loss of logits of three tokens and two durations."""
    targets, lengths = torch.tensor([[1, 2], [2, 2]], device=logits.device), ([3, 2], [2, 1])
    tokens, durations = logits.split([3, 2], 3)
    return partita.tdt_loss(tokens, durations, targets, *lengths, 0, [0, 1], 0.1, **options)


def head(hidden: Tensor, **options: object) -> Tensor:
    return partita.linear_cross_entropy(
        hidden, MATRIX.to(hidden.device), LABELS.to(hidden.device), **options
    )


def statistics(fields: partita.TokenStats) -> Tensor:
    return fields.logprob + 0.3 * fields.logsumexp - 0.7 * fields.entropy


LOSSES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "softmax": ((N, 5), lambda x: partita.softmax(x, 1)),
    "cross_entropy": ((N, 5), lambda x: partita.cross_entropy(x, LABELS.to(x.device), **ALL)),
    "cross_entropy, rows": (
        (N, 5),
        lambda x: partita.cross_entropy(x, LABELS.to(x.device), reduction="none", **ALL),
    ),
    "token_stats": ((N, 5), lambda x: statistics(partita.token_stats(x, LABELS.to(x.device)))),
    **{
        f"divergence, beta {beta}": (
            (N, 5),
            lambda x, beta=beta: partita.divergence(
                x, TEACHER.to(x.device), beta=beta, temperature=0.7, reduction="none"
            ),
        )
        for beta in (0.0, 0.3, 1.0)
    },
    "logprobs": ((N, 5), lambda x: partita.logprobs(x, IDS.to(x.device), temperature=0.7)),
    "topk_logprobs": ((N, 5), lambda x: partita.topk_logprobs(x, 3, temperature=0.7).logprobs),
    "linear_topk_logprobs": (
        (N, 4),
        lambda x: partita.linear_topk_logprobs(x, MATRIX.to(x.device), 3, memory_budget=2**20)[0],
    ),
    "topk_divergence": (
        (N, 5),
        lambda x: partita.topk_divergence(x, best_of(x.device), beta=0.3, reduction="none"),
    ),
    "linear_topk_divergence": (
        (N, 4),
        lambda x: partita.linear_topk_divergence(
            x, MATRIX.to(x.device), best_of(x.device), memory_budget=2**20
        ),
    ),
    "linear": ((N, 4), lambda x: head(x, memory_budget=2**20, z_loss=0.1)),
    "linear, rows": ((N, 4), lambda x: head(x, memory_budget=2**20, reduction="none")),
    "linear_logprobs": (
        (N, 4),
        lambda x: partita.linear_logprobs(
            x, MATRIX.to(x.device), IDS.to(x.device), memory_budget=2**20
        ),
    ),
    **{
        f"linear_divergence, {reduction}": (
            (N, 4),
            lambda x, reduction=reduction: partita.linear_divergence(
                x,
                MATRIX.to(x.device),
                TEACHER.to(x.device),
                TEACHER_MATRIX.to(x.device),
                beta=0.3,
                reduction=reduction,
                memory_budget=2**20,
            ),
        )
        for reduction in ("none", "mean")
    },
    "linear_token_stats": (
        (N, 4),
        lambda x: statistics(
            partita.linear_token_stats(
                x, MATRIX.to(x.device), LABELS.to(x.device), memory_budget=2**20
            )
        ),
    ),
    "ctc_loss": ((4, N, 3), lambda x: ctc(x, zero_infinity=True, from_logits=True)),
    "ctc_loss, rows": ((4, N, 3), lambda x: ctc(x, reduction="none")[:1]),
    "rnnt_loss": ((N, 3, 3, 3), lambda x: rnnt(x, delay_penalty=0.1, hat=True)),
    "rnnt_loss, rows": ((N, 3, 3, 3), lambda x: rnnt(x, reduction="none")),
    "tdt_loss": ((N, 3, 3, 5), tdt),
    "linear_rnnt_loss": (
        (N, 3, 4),
        lambda x: partita.linear_rnnt_loss(
            x,
            0.5 * x,
            MATRIX.to(x.device),
            torch.tensor([[1, 2], [2, 2]], device=x.device),
            *([3, 2], [2, 1]),
            activation="tanh",
            blank=0,
        ),
    ),
    "ctc_crf_loss": ((4, N, 6), lambda x: crf(x, "mean")),
    "ctc_crf_loss, rows": ((4, N, 6), lambda x: crf(x, "none")),
    "logz": ((3, N, 3, 3), lambda x: chain(x).logz()),
    "best score": ((3, N, 3, 3), lambda x: chain(x).logz(partita.Max)),
    "entropy": ((3, N, 3, 3), lambda x: chain(x).entropy()),
    "kl": ((3, N, 3, 3), lambda x: chain(OTHER.to(x.device)).kl(chain(x))),
    "expectation": ((3, N, 3, 3), lambda x: chain(x).expectation(OTHER.to(x.device))),
    "linear_chain": ((4, N, 3), lambda x: tags(x).logz()),
    "linear_chain, transitions": (
        (3, N, 3, 3),
        lambda x: partita.linear_chain(TOKENS.to(x.device), x, lengths=[4, 3]).logz(),
    ),
    "linear_chain, best score": ((4, N, 3), lambda x: tags(x).logz(partita.Max)),
    "linear_chain, entropy": ((4, N, 3), lambda x: tags(x).entropy()),
    "linear_chain, posteriors": ((4, N, 3), lambda x: tags(x).state_marginals()),
    "linear_chain, counts": ((4, N, 3), lambda x: tags(x).expected_counts().transitions),
    "linear_chain, path": (
        (4, N, 3),
        lambda x: tags(x).log_prob(torch.tensor([[0, 1]] * 4, device=x.device)),
    ),
    "semi_markov_chain": ((4, N, 3), lambda x: segments(x).logz()),
    "posteriors of segments": ((4, N, 3), lambda x: segments(x).segment_marginals()),
}
CURVED = [name for name in LOSSES if not name.endswith("best score")]
SCANS = [name for name in CURVED if len(LOSSES[name][0]) > 2]
EXACT = {"rtol": 1e-9, "atol": 1e-11}
losses = pytest.mark.parametrize("name", LOSSES)


@pytest.fixture(params=["auto", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest) -> object:
    with partita.backend(request.param):
        yield request.param


def plain(function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of a plain backward pass."""
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf, upstream)[0]


def sample(name: str, device: str) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Return a function, its argument, and three upstream gradients."""
    shape, function = LOSSES[name]
    x = numbers(*shape).to(device)
    return function, x, numbers(3, *function(x).shape, seed=2).to(device)


@devices
@losses
def test_batched_gradients(name: str, device: str) -> None:
    function, x, upstream = sample(name, device)
    expected = torch.stack([plain(function, x, each) for each in upstream])
    leaf = x.clone().requires_grad_()
    for graph in (False, True):
        (found,) = torch.autograd.grad(
            function(leaf), leaf, upstream, is_grads_batched=True, create_graph=graph
        )
        torch.testing.assert_close(found, expected, **EXACT)
    jacobian = torch.func.jacrev(function)(x)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(function, x, vectorize=True), jacobian, **EXACT
    )


@devices
@losses
def test_functional_gradients(name: str, device: str) -> None:
    function, x, upstream = sample(name, device)
    expected = plain(function, x, upstream[0])
    value, vjp = torch.func.vjp(function, x)
    torch.testing.assert_close(value, function(x), **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(vjp(upstream[0])[0], expected, **EXACT)
    torch.testing.assert_close(vjp(upstream[0])[0], expected, **EXACT)
    found = torch.func.grad(lambda x: (function(x) * upstream[0]).sum())(x)
    torch.testing.assert_close(found, expected, **EXACT)


@devices
@losses
def test_a_batch_of_arguments(name: str, device: str) -> None:
    function, x, upstream = sample(name, device)
    batch = torch.stack([x, -x, 0.5 * x], 1).requires_grad_()
    values = torch.vmap(function, 1)(batch)
    expected = torch.stack([function(each) for each in batch.unbind(1)])
    torch.testing.assert_close(values, expected, **EXACT)
    gradients = torch.stack(
        [plain(function, *pair) for pair in zip(batch.unbind(1), upstream, strict=True)], 1
    )
    torch.testing.assert_close(torch.autograd.grad(values, batch, upstream)[0], gradients, **EXACT)

    def gradient(x: Tensor, upstream: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (function(x) * upstream).sum())(x)

    found = torch.vmap(gradient, (1, 0), 1)(batch.detach(), upstream)
    torch.testing.assert_close(found, gradients, **EXACT)


@devices
@pytest.mark.parametrize("name", CURVED)
def test_second_derivatives(name: str, device: str) -> None:
    """Compare a functional Hessian, and that of a graph, with differences of gradients."""
    function, x, upstream = sample(name, device)
    direction, step = numbers(*x.shape, seed=3).to(device), 1e-5

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (function(x) * upstream[0]).sum())(x)

    ahead, behind = (plain(function, x + s * direction, upstream[0]) for s in (step, -step))
    expected = (ahead - behind) / (2 * step)
    _, vjp = torch.func.vjp(gradient, x)
    bounds = {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(vjp(direction)[0], expected, **bounds)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf), leaf, upstream[0], create_graph=True)
    batch = torch.stack([direction, 2 * direction])
    (found,) = torch.autograd.grad(first, leaf, batch, is_grads_batched=True)
    torch.testing.assert_close(found, torch.stack([expected, 2 * expected]), **bounds)


class Scatters(TorchDispatchMode):
    """Fails for sums that PyTorch adds up in no fixed order on a GPU."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        assert name not in ("index_add", "index_add_", "scatter_reduce", "scatter_reduce_"), name
        if name in ("scatter_add", "scatter_add_"):
            index = args[2].sort(args[1]).values
            size = index.shape[args[1]]
            repeats = index.narrow(args[1], 1, size - 1) == index.narrow(args[1], 0, size - 1)
            assert not repeats.any()
        return op(*args, **kwargs or {})


@devices
@pytest.mark.parametrize("name", SCANS)
def test_second_derivatives_are_added_up_in_a_fixed_order(
    name: str, device: str, backend: str
) -> None:
    function, x, upstream = sample(name, device)
    leaf = x.clone().requires_grad_()
    if backend == "reference":
        with Scatters():
            (first,) = torch.autograd.grad(function(leaf), leaf, upstream[0], create_graph=True)
            torch.autograd.grad(first.square().sum(), leaf)
    seconds = []
    for _ in range(2):
        (first,) = torch.autograd.grad(function(leaf), leaf, upstream[0], create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert torch.equal(*seconds)


@devices
def test_targets_and_lengths_may_be_batched(device: str) -> None:
    logits = numbers(4, N, 3).to(device)
    targets = torch.tensor([[[1, 2], [2, 2]], [[2, 1], [1, 0]]], device=device)
    steps, lengths = (torch.tensor(rows, device=device) for rows in ([[4, 3]] * 2, [[2, 1]] * 2))
    found = torch.vmap(lambda *t: partita.ctc_loss(logits, *t, reduction="none", from_logits=True))(
        targets, steps, lengths
    )
    expected = [
        partita.ctc_loss(logits, *each, reduction="none", from_logits=True)
        for each in zip(targets, steps, lengths, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected))


LAZY = {
    "negative": lambda x: torch._neg_view(-x),
    "part of a conjugate": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "copied on a write": torch._lazy_clone,
}


@devices
@losses
@pytest.mark.parametrize("kind", LAZY)
def test_tensors_whose_memory_does_not_hold_their_values(kind: str, name: str, device: str) -> None:
    function, x, upstream = sample(name, device)
    expected = plain(function, x, upstream[0])
    lazy = LAZY[kind]
    leaf = x.clone().requires_grad_()
    value = function(lazy(leaf))
    torch.testing.assert_close(value, function(x), **EXACT)
    (found,) = torch.autograd.grad(value, leaf, lazy(upstream[0]))
    torch.testing.assert_close(found, expected, **EXACT)


@devices
@losses
def test_zeros_without_memory(name: str, device: str) -> None:
    function, x, upstream = sample(name, device)
    zeros = torch._efficientzerotensor(upstream[0].shape, dtype=x.dtype, device=device)
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf, zeros)
    assert torch.equal(found, torch.zeros_like(x))
    leaf = torch._efficientzerotensor(x.shape, dtype=x.dtype, device=device)
    torch.testing.assert_close(function(leaf), function(torch.zeros_like(x)), **EXACT)


SEARCHES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], object]]] = {
    "Chain.viterbi": ((3, N, 3, 3), lambda x: chain(x).viterbi()),
    "Chain.nbest": ((3, N, 3, 3), lambda x: chain(x).nbest(2)),
    "Chain.backward_scores": ((3, N, 3, 3), lambda x: chain(x).backward_scores()),
    "LinearChain.viterbi": ((4, N, 3), lambda x: tags(x).viterbi()),
    "LinearChain.nbest": ((4, N, 3), lambda x: tags(x).nbest(2)),
    "LinearChain.log_prob": ((4, N, 3), lambda x: tags(x).log_prob(x.argsort(2)[..., 0])),
    "LinearChain of a mask": (
        (4, N, 3),
        lambda x: partita.linear_chain(x, MOVES.to(x.device), mask=(x < 9.0).all(2)).logz(),
    ),
    "SemiMarkovChain.viterbi": ((4, N, 3), lambda x: segments(x).viterbi()),
    "ctc_align": (
        (4, N, 3),
        lambda x: partita.ctc_align(x, LABELS[:, None].to(x.device) % 3, [4, 3], [1, 0])[:4],
    ),
    "ctc_greedy_search": ((4, N, 3), lambda x: partita.ctc_greedy_search(x, [4, 3])),
    "ctc_beam_search": ((4, N, 3), lambda x: partita.ctc_beam_search(x, [4, 3], nbest=2)),
    **{
        f"ctc_crf_decode, {method}": (
            (4, N, 6),
            lambda x, method=method: partita.ctc_crf_decode(
                x, state_len=1, alphabet_size=3, input_lengths=[4, 3], method=method
            ),
        )
        for method in ("viterbi", "posterior", "beam")
    },
    "rnnt_align": (
        (N, 3, 3, 3),
        lambda x: partita.rnnt_align(
            x, torch.tensor([[1, 2], [2, 2]], device=x.device), [3, 2], [2, 1], 0
        ),
    ),
}


@devices
@pytest.mark.parametrize("name", SEARCHES)
def test_searches_take_a_batch_of_arguments(name: str, device: str) -> None:
    shape, function = SEARCHES[name]
    batch = numbers(3, *shape).to(device)
    found = torch.vmap(function)(batch)
    expected = [function(each) for each in batch]
    if isinstance(found, Tensor):
        found, expected = (found,), [(each,) for each in expected]
    for field, *each in zip(found, *expected, strict=True):
        torch.testing.assert_close(field, torch.stack(each), rtol=0, atol=0)
