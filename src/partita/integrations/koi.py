"""The names of `koi.ctc`, as bonito imports them: chains and the lattice of a target, on any device, for any number of states and edges.

In place of its finite stand-in for no path stands -inf, and a path that is not there has the gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops.chain.api import Chain
from ..ops.ctc_crf.reference import ladder
from ..primitives.semiring import Log, Max, Semiring
from ..runtime import checks
from ..runtime.constants import constant
from ..runtime.dtypes import acc_dtype
from ..runtime.lengths import lengths_on_device

__all__ = [
    "Log",
    "Max",
    "SequenceDist",
    "bwd_scores_cu_sparse",
    "fwd_scores_cu_sparse",
    "logZ_cu",
    "logZ_cu_sparse",
    "semiring",
    "viterbi_alignments",
]

semiring = Semiring

_placed = WeakTensorKeyDictionary()  # of [version, the table on a device]


class SequenceDist:
    """What a distribution over sequences brings: log Z in nats, from which its posteriors come; the rest is its own.

    A subclass defines `logZ`, `viterbi` and `ctc_loss`.

    Source: `koi.ctc.SequenceDist` and `seqdist.core.SequenceDist`, 2020.

    Example:
        >>> import torch
        >>> from partita.integrations import koi
        >>> class Choice(koi.SequenceDist):
        ...     def logZ(self, scores, S=koi.Log):
        ...         return S.sum(scores, dim=-1)
        >>> Choice().posteriors(torch.zeros(1, 4))
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def logZ(self, scores: Tensor, S: Semiring = Log) -> Tensor:
        """log Z of the scores in nats, `[N]`; not defined here.

        Args:
            scores: `[...]`, as the subclass takes them.
            S: `Log`, `Max` or any other semiring.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError

    def viterbi(self, scores: Tensor) -> Tensor:
        """The best path of each sequence, `[...]` as the subclass gives it; not defined here.

        Args:
            scores: as in `SequenceDist.logZ`.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError

    def ctc_loss(self, scores: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        """The loss of each target in nats, a number or `[N]`; not defined here.

        Args:
            scores: as in `SequenceDist.logZ`.
            targets: `[N, S]`, 0 for padding.
            target_lengths: `[N]` integers.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError

    def posteriors(self, scores: Tensor, S: Semiring = Log) -> Tensor:
        """The gradient of `logZ`: probabilities under `Log`, the indicator of one best path under `Max`.

        Args:
            scores, S: as in `SequenceDist.logZ`.

        Returns:
            `[...]`, the shape of the scores.

        Raises:
            NotImplementedError: the subclass does not define `logZ`.

        Example:
            >>> import torch, partita
            >>> from partita.integrations import koi
            >>> class Chains(koi.SequenceDist):
            ...     def logZ(self, scores, S=koi.Log):
            ...         return partita.logz(scores, partita.dense_source(2), semiring=S)
            >>> Chains().posteriors(torch.zeros(1, 1, 2, 2), koi.Max).flatten()
            tensor([1., 0., 0., 0.])
        """
        variable = scores.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.logZ(variable, S).sum(), variable)[0]


def _on_device(idx: Tensor, device: torch.device) -> Tensor:
    """The table there: the same tensor for the same one, as what is built for a table is kept with it."""
    if (
        idx.device == device or torch.compiler.is_compiling() or idx.is_inference()
    ):  # such a tensor tells no version
        return idx.to(device)
    found = _placed.get(idx)
    if found is None or found[0] != idx._version or found[1].device != device:
        with torch.inference_mode(
            False
        ):  # what is made in that mode cannot be saved for a gradient later
            found = _placed[idx] = idx._version, idx.to(device)
    return found[1]


def _lattice(stay_scores: Tensor, move_scores: Tensor, target_lengths: Tensor) -> Chain:
    """Into state i come staying there and the move out of state i - 1; it starts in the first and ends in that of the length."""
    checks.floating("stay_scores", stay_scores)
    checks.floating("move_scores", move_scores)
    if stay_scores.ndim != 3:
        raise ValueError(f"stay_scores: expected shape [T, N, L], got {list(stay_scores.shape)}")
    device, states = stay_scores.device, stay_scores.shape[2]
    lengths = lengths_on_device("target_lengths", target_lengths, stay_scores.shape[1], device)[1]
    if move_scores.shape != (*stay_scores.shape[:2], max(states - 1, 0)):
        raise ValueError(
            f"move_scores: expected shape [T, N, L - 1] beside stay_scores, {list(stay_scores.shape)}, got {list(move_scores.shape)}"
        )
    scores = torch.stack(
        [stay_scores, torch.nn.functional.pad(move_scores, (min(states, 1), 0))], -1
    )
    state = torch.arange(states, device=device)
    dtype = acc_dtype(scores.dtype)
    initial = torch.where(state == 0, 0.0, -torch.inf).to(dtype).expand(stay_scores.shape[1], -1)
    final = torch.where(state == lengths[:, None] - 1, 0.0, -torch.inf).to(dtype)
    return Chain(scores, constant(ladder, states, device=device), initial, final)


def logZ_cu(
    stay_scores: Tensor, move_scores: Tensor, target_lengths: Tensor, S: Semiring = Log
) -> Tensor:
    """log Z of the lattice of each target: its states follow one another, from the first to the last, and each may stay.

    Args:
        stay_scores: `[T, N, L]` floating, of staying in each state.
        move_scores: `[T, N, L - 1]`, of moving from each state to the next.
        target_lengths: `[N]` integers, how many states count.
        S: `Log`, `Max` or any other semiring.

    Returns:
        `[N]`, in nats under `Log`, fp32 for half types; -inf for a length below 1 or over L and for one that T steps do not reach.
        Differentiable in the scores.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Source: the arguments are those of `koi.ctc.logZ_cu`, 2020.

    Example:
        >>> import torch
        >>> from partita.integrations import koi
        >>> koi.logZ_cu(torch.zeros(3, 1, 2), torch.zeros(3, 1, 1), torch.tensor([2])).exp()  # move in one of 3 steps
        tensor([3.])
    """
    return _lattice(stay_scores, move_scores, target_lengths).logz(S)


def viterbi_alignments(stay_scores: Tensor, move_scores: Tensor, target_lengths: Tensor) -> Tensor:
    """The best path through the lattice of each target.

    Args:
        stay_scores, move_scores, target_lengths: as in `logZ_cu`.

    Returns:
        `[T, N, L]`, 1 for the state that each step leaves, else 0; 0 throughout for a lattice without a path.

    Raises:
        TypeError, ValueError: as in `logZ_cu`.

    Source: the arguments are those of `koi.ctc.viterbi_alignments`, 2020.

    Example:
        >>> import torch
        >>> from partita.integrations import koi
        >>> stay, move = torch.zeros(3, 1, 2), torch.tensor([0.0, 0.0, 1.0]).reshape(3, 1, 1)
        >>> koi.viterbi_alignments(stay, move, torch.tensor([2])).squeeze(1)
        tensor([[1., 0.],
                [1., 0.],
                [1., 0.]])
    """
    left = (
        _lattice(stay_scores.detach(), move_scores.detach(), target_lengths).viterbi().states[:-1]
    )
    there = (left >= 0).to(stay_scores.dtype)[..., None]
    return stay_scores.new_zeros(stay_scores.shape).scatter_(2, left.clamp(min=0)[..., None], there)


def logZ_cu_sparse(
    Ms: Tensor, idx: Tensor, v0: Tensor, vT: Tensor, S: Semiring = Log, K: int = 1
) -> Tensor:
    """log Z of sparse linear chains.

    Args:
        Ms: `[T, N, C, NZ]` floating, the scores of the edges into each state.
        idx: `[C, NZ]` integers on any device, the states that they come from.
        v0, vT: `[N, C]`, the scores of the first and the last state.
        S: `Log`, `Max` or any other semiring.
        K: not looked at.

    Returns:
        `[N]`, in nats under `Log`, fp32 for half types. Differentiable in Ms, v0 and vT.

    Raises:
        TypeError, ValueError: as in `partita.Chain`.

    Source: the arguments are those of `koi.ctc.logZ_cu_sparse`, 2020.

    Example:
        >>> import torch, partita
        >>> from partita.integrations import koi
        >>> idx = partita.debruijn_source(2, 1).int()
        >>> koi.logZ_cu_sparse(torch.zeros(2, 1, 2, 3), idx, torch.zeros(1, 2), torch.zeros(1, 2)).exp()
        tensor([18.])
    """
    return Chain(Ms, _on_device(idx, Ms.device), v0, vT).logz(S)


def fwd_scores_cu_sparse(
    Ms: Tensor, idx: Tensor, v0: Tensor, S: Semiring = Log, K: int = 1
) -> Tensor:
    """α: the sum over all ways to be in each state after each step.

    Args:
        Ms, idx, v0, S, K: as in `logZ_cu_sparse`.

    Returns:
        `[T + 1, N, C]`, in nats under `Log`, fp32 for half types; without a gradient, as koi's.

    Raises:
        TypeError, ValueError: as in `partita.Chain`.

    Source: the arguments are those of `koi.ctc.fwd_scores_cu_sparse`, 2020.

    Example:
        >>> import torch, partita
        >>> from partita.integrations import koi
        >>> idx = partita.debruijn_source(2, 1).int()
        >>> koi.fwd_scores_cu_sparse(torch.zeros(2, 1, 2, 3), idx, torch.zeros(1, 2))[:, 0, 0].exp()
        tensor([1., 3., 9.])
    """
    with torch.no_grad():
        return Chain(Ms, _on_device(idx, Ms.device), v0).forward_scores(S)


def bwd_scores_cu_sparse(
    Ms: Tensor, idx: Tensor, vT: Tensor, S: Semiring = Log, K: int = 1
) -> Tensor:
    """β: the sum over all ways to go on from each state after each step.

    Args:
        Ms, idx, vT, S, K: as in `logZ_cu_sparse`.

    Returns:
        `[T + 1, N, C]`, in nats under `Log`, fp32 for half types; without a gradient, as koi's.

    Raises:
        TypeError, ValueError: as in `partita.Chain`.

    Source: the arguments are those of `koi.ctc.bwd_scores_cu_sparse`, 2020.

    Example:
        >>> import torch, partita
        >>> from partita.integrations import koi
        >>> idx = partita.debruijn_source(2, 1).int()
        >>> koi.bwd_scores_cu_sparse(torch.zeros(2, 1, 2, 3), idx, torch.zeros(1, 2))[:, 0, 0].exp()
        tensor([9., 3., 1.])
    """
    with torch.no_grad():
        return Chain(
            Ms, _on_device(idx, Ms.device), vT.new_zeros(()).expand_as(vT), vT
        ).backward_scores(S)
