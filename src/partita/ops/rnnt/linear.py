"""Transducer losses from encoder and predictor, without the joint network's output in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, needs_gradient, refuse_forward_mode, top_transform
from ...runtime.backend import current_backend
from ...runtime.invariance import is_batch_invariant
from ...runtime.lengths import Lengths
from ...runtime.sizes import holds, same_sizes
from ..ctc.common import reduce_losses
from ..linear_heads.common import cast_to_autocast
from ..linear_heads.low_rank import LoRA
from ..linear_heads.plan import check_budget
from ..linear_heads.products import aligned_columns
from .arguments import checked_durations, class_index, node_options, sequences_of
from .autograd import TENSORS, LinearLoss, losses_of_joint
from .common import ACTIVATIONS, NO_DURATIONS, REDUCTIONS
from .plan import joint_chunks


def _check_inputs(named: dict[str, Any]) -> None:
    """Raise unless encoder, predictor, matrices and biases fit each other."""
    encoder = named["encoder"]
    for name, value in named.items():
        if value is None and name.endswith("bias"):
            continue
        checks.floating(name, value)
        checks.device(name, value, encoder, "encoder")
        if value.dtype != encoder.dtype:
            raise TypeError(
                f"{name}: expected the dtype of encoder, {encoder.dtype}, got {value.dtype}"
            )
    predictor = named["predictor"]
    if encoder.ndim != 3:
        raise ValueError(f"encoder: expected shape [B, T, D], got {list(encoder.shape)}")
    B, _, D = encoder.shape
    if predictor.ndim != 3 or not (
        same_sizes(predictor.shape[::2], (B, D)) and holds(predictor.shape[1] >= 1)
    ):
        raise ValueError(
            f"predictor: expected shape [B, U + 1, D] with B = {B}, U >= 0 and D = {D},"
            f" got {list(predictor.shape)}"
        )
    for name in ("linear", "duration"):
        weight, bias = named.get(f"{name}_weight"), named.get(f"{name}_bias")
        if weight is None:
            continue
        if weight.ndim != 2 or weight.shape[1] != D or not len(weight):
            raise ValueError(
                f"{name}_weight: expected shape [X, D] with X >= 1 and D = {D},"
                f" got {list(weight.shape)}"
            )
        if bias is not None:
            checks.shape(f"{name}_bias", bias, weight.shape[:1], f"the rows of {name}_weight")


def _loss(
    named: dict[str, Any],
    sequences: tuple[Tensor, Lengths, Lengths],
    activation: str,
    blank: tuple[str, int],
    durations: Any,
    numbers: tuple[bool, float, float, float],
    reduction: str,
    memory_budget: int | None,
    low_rank: LoRA | None,
) -> Tensor:
    """Check the arguments, and return the reduced loss by the path that suits the call.

    `named` has encoder, predictor, and matrix and bias of each head by the names of the arguments,
    and `blank` the name and the value of one. The numbers are `hat`, sigma, the delay penalty and
    the factor of FastEmit.
    """
    checks.choice("reduction", reduction, REDUCTIONS)
    checks.choice("activation", activation, ACTIVATIONS)
    check_budget(memory_budget)
    for name, value in named.items():
        if value is not None or not name.endswith("bias"):
            checks.tensor(name, value)
    cast: Sequence[Any] = cast_to_autocast(*named.values())  # in the dtype of autocast
    _check_inputs(dict(zip(named, cast, strict=True)))
    encoder, predictor, weight = cast[:3]
    (B, T, D), U1, V = encoder.shape, predictor.shape[1], weight.shape[0]
    sequences = sequences_of(*sequences, (B, T, U1), encoder.device)
    chosen = NO_DURATIONS
    if durations is not None:
        chosen = checked_durations(durations, len(named["duration_weight"]))
    options = (activation, class_index(*blank, V), chosen, True, *numbers)
    if reduction == "mean" and durations is None:
        reduction = "mean_batch"
    factors = _factors(low_rank, encoder, V + len(chosen))
    heads = (*cast, *(None,) * (TENSORS - len(factors) - len(cast)))
    backend, tensors = current_backend(), (*heads, *factors)
    refuse_forward_mode(*tensors)
    invariant = is_batch_invariant()
    if top_transform() is not None:
        losses = losses_of_joint(tensors, (*sequences, *options, backend), invariant)
        return reduce_losses(losses, sequences[2], reduction)
    wanted = [needs_gradient(x) for x in tensors]
    is_reduced = reduction != "none" and encoder.dtype != torch.float16
    sizes = (B, T, U1 - 1, D, V, encoder.dtype, len(chosen))
    rest = (memory_budget, any(wanted), is_reduced, invariant)
    rank = 0 if factors[0] is None else len(factors[0])
    chunk, keeps_logits, _ = joint_chunks(*sizes, *rest, rank)
    inside, after = (reduction, "none") if is_reduced and any(wanted) else ("none", reduction)
    chunks = (chunk, keeps_logits, invariant, wanted)
    losses = apply(LinearLoss, *tensors, *sequences, *options, *chunks, inside, backend)[0]
    return reduce_losses(losses, sequences[2], after)


def _factors(
    low_rank: LoRA | None, encoder: Tensor, rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return scale * A and B in the dtype of the encoder, with zeros up to an aligned rank."""
    if low_rank is None:
        return None, None
    if not isinstance(low_rank, LoRA):
        raise TypeError(f"low_rank: expected a LoRA or None, got {low_rank!r}")
    A, B, scale = low_rank
    for name, factor in (("low_rank.A", A), ("low_rank.B", B)):
        checks.floating(name, factor)
        checks.device(name, factor, encoder, "encoder")
    checks.number("low_rank.scale", scale, low=-torch.inf)
    checks.shape("low_rank.A", A, (*A.shape[:1], encoder.shape[2]), "[r, D]")
    checks.shape("low_rank.B", B, (rows, len(A)), "[rows of all matrices, r]")
    A, B = aligned_columns(A.T * scale).T, aligned_columns(B)
    return A.to(encoder.dtype).contiguous(), B.to(encoder.dtype)


def linear_rnnt_loss(
    encoder: Tensor,
    predictor: Tensor,
    linear_weight: Tensor,
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    *,
    linear_bias: Tensor | None = None,
    activation: str = "relu",
    blank: int = -1,
    reduction: str = "mean",
    hat: bool = False,
    fastemit_lambda: float = 0.0,
    delay_penalty: float = 0.0,
    memory_budget: int | None = None,
    low_rank: LoRA | None = None,
) -> Tensor:
    """Return `rnnt_loss` of a joint network whose output is never in memory.

    The logits are `activation(encoder[:, :, None] + predictor[:, None]) @ linear_weight.T +
    linear_bias`. They exist for a few steps at a time.

    Args:
        encoder: `[B, T, D]` floating. Entries past the lengths are not read and get the gradient 0.
        predictor: `[B, U + 1, D]`, of the same dtype as the others: the output at the start of a
            sequence, and after each of its labels.
        linear_weight: `[V, D]`.
        targets: `[B, U]` integers from 0 to V - 1, other than the blank.
        logit_lengths, target_lengths: `[B]`, tensors on any device, lists or tuples.
        linear_bias: `[V]`.
        activation: `relu`, `tanh` or `sigmoid`.
        blank, reduction, hat, fastemit_lambda, delay_penalty: as in `rnnt_loss`.
        memory_budget: bytes of workspace; see `linear_rnnt_plan`.
        low_rank: `LoRA(A, B, scale)` with A `[r, D]` and B `[V, r]` in any floating dtypes, which
            adds `scale * B @ A` to the matrix without forming it. The products take copies in the
            dtype of the others.

    Returns:
        A number, or `[B]`, in nats; fp32 for half types. Under autocast the inputs are cast as
        those of a linear layer are.

    Raises:
        TypeError, ValueError, IndexError: as in `rnnt_loss`, and a budget that is too small.

    Source: Graves, Sequence transduction with recurrent neural networks, 2012, with the joint of
        Graves et al., Speech recognition with deep recurrent neural networks, 2013.

    Example:
        >>> import torch, partita
        >>> encoder, predictor = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
        >>> weight, targets = torch.randn(2, 4), torch.tensor([[1]])
        >>> partita.linear_rnnt_loss(encoder, predictor, weight, targets, [2], [1], blank=0)
        tensor(1.3863)
    """
    named = {
        "encoder": encoder,
        "predictor": predictor,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
    }
    sequences = (targets, logit_lengths, target_lengths)
    hat, fastemit, delay = node_options(True, hat, fastemit_lambda, delay_penalty)
    options = (activation, ("blank", blank), None, (hat, 0.0, delay, fastemit))
    return _loss(named, sequences, *options, reduction, memory_budget, low_rank)


def linear_tdt_loss(
    encoder: Tensor,
    predictor: Tensor,
    linear_weight: Tensor,
    duration_weight: Tensor,
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    blank_token_id: int,
    durations: Sequence[int],
    sigma: float = 0.0,
    reduction: str = "mean",
    *,
    linear_bias: Tensor | None = None,
    duration_bias: Tensor | None = None,
    activation: str = "relu",
    memory_budget: int | None = None,
    low_rank: LoRA | None = None,
) -> Tensor:
    """Return `tdt_loss` of a joint network whose output is never in memory.

    Token and duration logits are linear functions of
    `activation(encoder[:, :, None] + predictor[:, None])`. They exist for a few steps at a time.

    Args:
        encoder: `[B, T, D]` floating. Entries past the lengths are not read and get the gradient 0.
        predictor: `[B, U + 1, D]`, of the same dtype as the others: the output at the start of a
            sequence, and after each of its labels.
        linear_weight, duration_weight: `[V, D]` of the tokens and `[K, D]` of the durations.
        linear_bias, duration_bias: `[V]` and `[K]`.
        targets: `[B, U]` integers from 0 to V - 1, other than the blank.
        logit_lengths, target_lengths: `[B]`, tensors on any device, lists or tuples.
        blank_token_id, durations, sigma, reduction: as in `tdt_loss`.
        activation: `relu`, `tanh` or `sigmoid`.
        memory_budget: bytes of workspace; see `linear_rnnt_plan`.
        low_rank: as in `linear_rnnt_loss`, with B `[V + K, r]`: tokens, then durations.

    Returns:
        A number, or `[B]`, in nats; fp32 for half types. Under autocast the inputs are cast as
        those of a linear layer are.

    Raises:
        TypeError, ValueError, IndexError: as in `tdt_loss`, and a budget that is too small.

    Source: Xu et al., Efficient sequence transduction by jointly predicting tokens and durations,
        2023.

    Example:
        >>> import torch, partita
        >>> encoder, predictor = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
        >>> weights, targets = (torch.randn(2, 4), torch.randn(2, 4)), torch.tensor([[1]])
        >>> lengths = [2], [1]
        >>> # Each of three paths has two or three arcs of probability 1 / 4.
        >>> loss = partita.linear_tdt_loss(
        ...     encoder, predictor, *weights, targets, *lengths, 0, [0, 1]
        ... )
        >>> torch.isclose((-loss).exp(), torch.tensor(1 / 16 + 2 / 64))
        tensor(True)
    """
    named = {
        "encoder": encoder,
        "predictor": predictor,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
        "duration_weight": duration_weight,
        "duration_bias": duration_bias,
    }
    sequences = (targets, logit_lengths, target_lengths)
    checks.number("sigma", sigma, low=0.0)
    numbers = (False, float(sigma), 0.0, 0.0)
    options = (activation, ("blank_token_id", blank_token_id), durations, numbers)
    return _loss(named, sequences, *options, reduction, memory_budget, low_rank)
