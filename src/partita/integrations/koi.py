"""The names of `koi.ctc` that bonito imports, for any device and any number of states and edges.

A sum over no path is -inf, not koi's finite stand-in, and its gradient is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.chain.api import Chain
from ..ops.ctc_crf.common import lattice_source
from ..primitives.semiring import Log, Max, Semiring
from ..runtime import checks
from ..runtime.autograd import is_batched
from ..runtime.caches import TableCache
from ..runtime.constants import constant
from ..runtime.dtypes import acc_dtype
from ..runtime.lengths import lengths_on_device
from .naming import Renamed

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

NAMES = {"scores": "Ms", "source": "idx", "initial": "v0", "final": "vT"}  # koi's, by ours
_device_tables = TableCache("integrations.koi.device_tables")  # copies of tables on a device


class SequenceDist:
    """A distribution over sequences, which derives posteriors from log Z in nats.

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
        """Return log Z of the scores in nats, `[N]`; a subclass defines it.

        Args:
            scores: `[...]`, in the form that the subclass takes.
            S: `Log`, `Max` or any other semiring.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError

    def viterbi(self, scores: Tensor) -> Tensor:
        """Return the best path of each sequence, `[...]`; a subclass defines it.

        Args:
            scores: as in `SequenceDist.logZ`.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError

    def ctc_loss(self, scores: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        """Return the loss of the targets in nats, a number or `[N]`; a subclass defines it.

        Args:
            scores: as in `SequenceDist.logZ`.
            targets: `[N, S]`, 0 for padding.
            target_lengths: `[N]` integers.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError

    def posteriors(self, scores: Tensor, S: Semiring = Log) -> Tensor:
        """Return the gradient of `logZ`.

        It holds probabilities under `Log` and the indicator of one best path under `Max`.

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
    """Return the table on a device.

    The same table gives the same tensor each time, so that what is cached for a table is found.
    """
    if idx.device == device or torch.compiler.is_compiling() or is_batched(idx):
        return idx.to(device)
    found: Tensor | None = _device_tables.get(idx)
    if found is None or found.device != device:
        # A tensor made in inference mode could not be saved for a gradient later.
        with torch.inference_mode(False):
            found = _device_tables.store(idx, idx.to(device))
    return found


def _lattice(stay_scores: Tensor, move_scores: Tensor, target_lengths: Tensor) -> Chain:
    """Return the chain in which state i stays or is entered from state i - 1.

    It starts in the first state and ends in the last one of the target.
    """
    checks.floating("stay_scores", stay_scores)
    checks.floating("move_scores", move_scores)
    if stay_scores.ndim != 3:
        raise ValueError(f"stay_scores: expected shape [T, N, L], got {list(stay_scores.shape)}")
    (T, N, L), device = stay_scores.shape, stay_scores.device
    lengths = lengths_on_device("target_lengths", target_lengths, N, device)[1]
    if move_scores.shape != (T, N, max(L - 1, 0)):
        raise ValueError(
            "move_scores: expected shape [T, N, L - 1] for stay_scores of shape"
            f" {list(stay_scores.shape)}, got {list(move_scores.shape)}"
        )
    move_scores = torch.nn.functional.pad(move_scores, (min(L, 1), 0))
    scores = torch.stack([stay_scores, move_scores], -1)
    state = torch.arange(L, device=device)
    dtype = acc_dtype(scores.dtype)
    initial = torch.where(state == 0, 0.0, -torch.inf).to(dtype).expand(N, -1)
    final = torch.where(state == lengths[:, None] - 1, 0.0, -torch.inf).to(dtype)
    return Chain(scores, constant(lattice_source, L, device=device), initial, final)


def logZ_cu(
    stay_scores: Tensor, move_scores: Tensor, target_lengths: Tensor, S: Semiring = Log
) -> Tensor:
    """Return log Z of the lattice of each target.

    A path leads from the first state to the last; at each step it stays or moves to the next state.

    Args:
        stay_scores: `[T, N, L]` floating, the scores of staying in each state.
        move_scores: `[T, N, L - 1]`, the scores of moving from each state to the next.
        target_lengths: `[N]` integers, the number of states of each target.
        S: `Log`, `Max` or any other semiring.

    Returns:
        `[N]`, in nats under `Log`, fp32 for half types; -inf for a length below 1 or above L, and
        for one that T steps cannot reach. Differentiable in the scores.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Source: the arguments are those of `koi.ctc.logZ_cu`, 2020.

    Example:
        >>> import torch
        >>> from partita.integrations import koi
        >>> stay, move = torch.zeros(3, 1, 2), torch.zeros(3, 1, 1)
        >>> koi.logZ_cu(stay, move, torch.tensor([2])).exp()  # The move is at one of 3 steps.
        tensor([3.])
    """
    return _lattice(stay_scores, move_scores, target_lengths).logz(S)


def viterbi_alignments(stay_scores: Tensor, move_scores: Tensor, target_lengths: Tensor) -> Tensor:
    """Return the best path through the lattice of each target.

    Args:
        stay_scores, move_scores, target_lengths: as in `logZ_cu`.

    Returns:
        `[T, N, L]`, 1 for the state that each step leaves and 0 elsewhere; all 0 for a lattice
        without a path, or with NaN.

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
    lattice = _lattice(stay_scores.detach(), move_scores.detach(), target_lengths)
    left = lattice.viterbi().states[:-1]
    indicator = (left >= 0).to(stay_scores.dtype)[..., None]
    path = stay_scores.new_zeros(stay_scores.shape)
    return path.scatter_(2, left.clamp(min=0)[..., None], indicator)


def logZ_cu_sparse(
    Ms: Tensor, idx: Tensor, v0: Tensor, vT: Tensor, S: Semiring = Log, K: int = 1
) -> Tensor:
    """Return log Z of sparse linear chains.

    Args:
        Ms: `[T, N, C, NZ]` floating, the scores of the edges into each state.
        idx: `[C, NZ]` integers on any device, the states that they come from.
        v0, vT: `[N, C]`, the scores of the first and the last state.
        S: `Log`, `Max` or any other semiring.
        K: ignored.

    Returns:
        `[N]`, in nats under `Log`, fp32 for half types. Differentiable in Ms, v0 and vT.

    Raises:
        TypeError, ValueError: as in `partita.Chain`.

    Source: the arguments are those of `koi.ctc.logZ_cu_sparse`, 2020.

    Example:
        >>> import torch, partita
        >>> from partita.integrations import koi
        >>> idx, ends = partita.debruijn_source(2, 1).int(), torch.zeros(1, 2)
        >>> koi.logZ_cu_sparse(torch.zeros(2, 1, 2, 3), idx, ends, ends).exp()
        tensor([18.])
    """
    with Renamed(NAMES):
        return Chain(Ms, _on_device(idx, Ms.device), v0, vT).logz(S)


def fwd_scores_cu_sparse(
    Ms: Tensor, idx: Tensor, v0: Tensor, S: Semiring = Log, K: int = 1
) -> Tensor:
    """Return α: the sum over all paths that lead to each state after each step.

    Args:
        Ms, idx, v0, S, K: as in `logZ_cu_sparse`.

    Returns:
        `[T + 1, N, C]`, in nats under `Log`, fp32 for half types. Like koi's, it has no gradient.

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
    with torch.no_grad(), Renamed(NAMES):
        return Chain(Ms, _on_device(idx, Ms.device), v0).forward_scores(S)


def bwd_scores_cu_sparse(
    Ms: Tensor, idx: Tensor, vT: Tensor, S: Semiring = Log, K: int = 1
) -> Tensor:
    """Return β: the sum over all paths that continue from each state after each step.

    Args:
        Ms, idx, vT, S, K: as in `logZ_cu_sparse`.

    Returns:
        `[T + 1, N, C]`, in nats under `Log`, fp32 for half types. Like koi's, it has no gradient.

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
    with torch.no_grad(), Renamed(NAMES):
        return Chain(Ms, _on_device(idx, Ms.device), None, vT).backward_scores(S)
