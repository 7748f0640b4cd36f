"""Decoding of CTC-CRF: the best path, the best path of posteriors, and prefix beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import Lengths, as_lengths, on_device
from ..chain.api import Chain
from ..ctc_crf.common import kmer_source, unflatten_scores
from . import registered
from .basecalls import Basecalls
from .common import MAX_BEAM_WIDTH

METHODS = ("viterbi", "posterior", "beam")
MAX_ALPHABET = 60  # bases of which a word has a bit each


def ctc_crf_decode(
    scores: Tensor,
    *,
    state_len: int,
    alphabet_size: int,
    input_lengths: Lengths | None = None,
    method: str = "viterbi",
    beam_width: int = 32,
) -> Basecalls:
    """Return the called bases of CTC-CRF scores, with the log-probability of each.

    Args:
        scores: `[T, N, C * A]` or `[T, N, C, A]` floating, as in `ctc_crf_loss`.
        state_len: k, the bases of a k-mer.
        alphabet_size: A, the bases and the blank.
        input_lengths: `[N]`, the number of valid steps, a tensor on any device, a list or a tuple;
            all steps if None.
        method: `viterbi` is the best path; `posterior` the best path over the logs of the posterior
            probabilities of the edges; `beam` the sequence of bases that is most probable over the
            paths that a prefix beam search sums. `beam` runs on the CPU only.
        beam_width: the number of prefixes that go on after each step, from 1 to 256.

    Returns:
        `Basecalls(labels, lengths, log_probs, steps, moves)` with S = T + k, in nats. The
        log-probability of a base is the log of the mean, over the steps from its move up to the
        next one, of the posterior probability that the k-mer ends in this base. For the first k
        bases it is that of the base in the first k-mer. Not differentiable.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, lengths or numbers. Lengths on a GPU are
            checked only with `PARTITA_CHECK=1`; otherwise an invalid sequence has no bases.
        RuntimeError: `beam` on a GPU.

    Source: Oxford Nanopore's bonito, 2020, for `posterior`; its dorado, 2023, ranks prefixes by the
        score of all that follows too, as `beam` does.

    Example:
        >>> import torch, partita
        >>> scores = torch.zeros(3, 1, 4, 5)  # three steps, single bases
        >>> scores[1, 0, 2, 1 + 0] = 9.0  # the second step moves from the first to the third base
        >>> scores[0, 0, 0, 0] = scores[2, 0, 2, 0] = 5.0
        >>> calls = partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5, method="posterior")
        >>> calls.labels, calls.steps, calls.moves
        (tensor([[1, 3, 0, 0]]), tensor([[-1,  1, -1, -1]]), tensor([[False,  True, False]]))
    """
    checks.choice("method", method, METHODS)
    checks.python_int("beam_width", beam_width)
    if not 1 <= beam_width <= MAX_BEAM_WIDTH:
        raise ValueError(
            f"beam_width: expected a number from 1 to {MAX_BEAM_WIDTH}, got {beam_width}"
        )
    _check_scores(scores, state_len, alphabet_size)
    if method == "beam" and alphabet_size > MAX_ALPHABET:
        raise ValueError(
            f"alphabet_size: expected at most {MAX_ALPHABET} for a beam, got {alphabet_size}"
        )
    with torch.no_grad():
        source = constant(kmer_source, alphabet_size - 1, state_len, device=scores.device)
        edges = unflatten_scores(scores, source)
        T, N = edges.shape[:2]
        if input_lengths is None:
            lengths = scores.new_full((N,), T, dtype=torch.int64)
        else:
            host_lengths = as_lengths("input_lengths", input_lengths, N)
            lengths = on_device(scores.device, host_lengths)[0]
        checks.within("input_lengths", lengths, 0, T, "steps")
        chain = Chain(edges, source, lengths=lengths)
        marginals = chain.marginals()
        if method == "viterbi":
            path = chain.viterbi()[1:]
        elif method == "posterior":
            path = Chain(marginals.log(), source, lengths=lengths).viterbi()[1:]
        else:
            later = chain.backward_scores()
            path = registered.crf_beam_search(edges, later, lengths, beam_width, current_backend())
        return _basecalls(*path, marginals, lengths, state_len)


def _check_scores(scores: Tensor, state_len: int, alphabet_size: int) -> None:
    checks.floating("scores", scores)
    for name, value, least in (("state_len", state_len, 1), ("alphabet_size", alphabet_size, 2)):
        checks.python_int(name, value)
        if value < least:
            raise ValueError(f"{name}: expected a number of at least {least}, got {value}")
    C, A = (alphabet_size - 1) ** state_len, alphabet_size
    if scores.ndim not in (3, 4) or scores.shape[2:] not in ((C * A,), (C, A)):
        raise ValueError(
            "scores: expected shape [T, N, C * A] or [T, N, C, A]"
            f" with C = {A - 1}^{state_len} = {C} and A = {A}, got {list(scores.shape)}"
        )


def _basecalls(
    states: Tensor, edges: Tensor, marginals: Tensor, lengths: Tensor, state_len: int
) -> Basecalls:
    """Return the bases of paths: states `[T + 1, N]` and edges `[T, N]`, -1 where there is none.

    All sums have a fixed order, so that the results have the same bits each time.
    """
    T, N, _, A = marginals.shape
    bases, S = A - 1, T + state_len
    has_path, edges = states[0] >= 0, edges.T
    moves = (edges >= 0) & (edges % A > 0)
    position = state_len - 1 + moves.cumsum(1)
    index = torch.where(moves, position, S)  # other steps go to a column that is dropped
    last = (states[1:].T % bases).clamp(min=0)
    step = torch.arange(T, device=edges.device).expand(N, -1)
    labels = edges.new_zeros(N, S + 1).scatter_(1, index, last + 1)[:, :S]
    steps = edges.new_full((N, S + 1), -1).scatter_(1, index, step)[:, :S]
    power = bases ** torch.arange(state_len - 1, -1, -1, device=edges.device)
    first = states[0][:, None].clamp(min=0) // power % bases  # [N, k]
    labels[:, :state_len] = first + 1
    number = torch.where(has_path, state_len + moves.sum(1), 0)
    valid = torch.arange(S, device=edges.device) < number[:, None]
    probability = torch.cat(
        [
            _first_posteriors(marginals, lengths, first),
            _step_posteriors(marginals, last, steps[:, state_len:], lengths),
        ],
        1,
    )
    log_probs = torch.where(valid, probability.log().clamp(max=0.0), 0.0)
    return Basecalls(
        labels * valid,
        number,
        log_probs.to(acc_dtype(marginals.dtype)),
        torch.where(valid, steps, -1),
        moves,
    )


def _step_posteriors(marginals: Tensor, last: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean posterior of each base after its move, `[N, T]` fp64, given the moves' steps.

    `last` is the base in which the path's k-mer ends after each step, `[N, T]`.
    """
    T, N, C, A = marginals.shape
    by_base = marginals.double().sum(3).reshape(T, N, C // (A - 1), A - 1).sum(2).transpose(0, 1)
    posterior = by_base.gather(2, last[..., None]).squeeze(2)
    total = torch.nn.functional.pad(posterior.cumsum(1), (1, 0))
    length = lengths.clamp(0, T)[:, None]
    start = torch.where(steps >= 0, steps, length)
    # A base ends where the next one starts, and the last one with the sequence.
    end = torch.cat([start[:, 1:], length], 1)
    return (total.gather(1, end) - total.gather(1, start)) / (end - start).clamp(min=1)


def _first_posteriors(marginals: Tensor, lengths: Tensor, first: Tensor) -> Tensor:
    """Return the posterior of each base of the first k-mer, `[N, k]` fp64, in the initial state."""
    T, N, C, A = marginals.shape
    bases, state_len = A - 1, first.shape[1]
    uniform = marginals.new_full((N, C), 1.0 / C, dtype=torch.float64)
    if not T:
        state = uniform
    else:
        edges = marginals[0].double()
        # The k-mer j x moves to the k-mers x e through their column 1 + j.
        leaving = edges[:, :, 1:].reshape(N, C // bases, bases, bases).sum(2).transpose(1, 2)
        state = edges[:, :, 0] + leaving.reshape(N, C)
        state = torch.where(lengths[:, None] > 0, state, uniform)
    found = []
    for i in range(state_len):
        by_base = state.reshape(N, bases**i, bases, -1).sum((1, 3))
        found.append(by_base.gather(1, first[:, i : i + 1]))
    return torch.cat(found, 1)
