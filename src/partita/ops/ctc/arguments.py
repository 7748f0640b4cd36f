"""The arguments of CTC's functions: checked, and in the form that the registered ops take.

Small batches are common, so the usual forms (int64 targets that are padded, and lengths as int64
tensors `[N]`) take few calls of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, private_names
from ...runtime.autograd import plain_eager
from ...runtime.caches import BoundedCache, register_cache
from ...runtime.lengths import Lengths, as_lengths, on_device
from ...runtime.sizes import holds
from .common import CTCInputs, longest_target

# The offsets of padded targets by N, S, device and stream. An entry costs less than two launches.
_cached_offsets: BoundedCache[tuple[int, int, int, int], Tensor] = BoundedCache(256)
register_cache("ctc.arguments.row_offsets", _cached_offsets.clear)


def prepare(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int,
    from_logits: bool = False,
    label_priors: Tensor | None = None,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> CTCInputs:
    """Check the arguments of `ctc_loss`, and bring them into the form of the ops."""
    logits = check_tensors(log_probs, targets, blank)
    T, N = logits.shape[:2]
    try:
        steps = _lengths("input_lengths", input_lengths, N)
        lengths = _lengths("target_lengths", target_lengths, N)
    except ValueError as error:
        raise ValueError(f"{error}{_order_hint(input_lengths, T)}") from None
    longest = longest_target(lengths, targets)
    if targets.ndim == 2:
        offsets = _row_offsets(N, targets.shape[1], logits.device)
        steps, lengths = on_device(logits.device, steps, lengths)
    else:
        # The clamp bounds how far an invalid length can shift the targets after it.
        clamped = lengths.clamp(0, targets.shape[0])
        steps, lengths, offsets = on_device(
            logits.device, steps, lengths, clamped.cumsum(0) - clamped
        )
    labels = targets.contiguous()
    if labels.dtype not in (torch.int32, torch.int64):
        labels = labels.long()  # comparisons with C or the blank would wrap in a narrow dtype
    star = check_options(logits, label_priors, prior_scale, star)
    # The scale counts in the key of a call, so calls without priors all have the same.
    scale = 1.0 if label_priors is None else float(prior_scale)
    targets_of_ops = (labels, offsets, steps, lengths, longest, blank)
    return CTCInputs(logits, *targets_of_ops, from_logits, label_priors, scale, star)


def check_tensors(logits: Tensor, targets: Tensor, blank: int) -> Tensor:
    """Return the logits as `[T, N, C]`, or raise for a wrong dtype, shape, device or blank."""
    checks.floating("log_probs", logits)
    checks.integer("targets", targets)
    checks.device("targets", targets, logits, "log_probs")
    if logits.ndim != 3:
        if logits.ndim != 2:
            raise ValueError(
                f"log_probs: expected shape [T, N, C] or [T, C], got {list(logits.shape)}"
            )
        logits = logits[:, None]
    T, N, C = logits.shape
    if C == 0:
        raise ValueError(f"log_probs: expected at least one class, got shape {list(logits.shape)}")
    if targets.ndim != 1 and (targets.ndim != 2 or not holds(targets.shape[0] == N)):
        raise ValueError(
            f"targets: expected shape [N, S] with N = {N}, or [sum of target_lengths],"
            f" got {list(targets.shape)}{_order_hint(targets, T)}"
        )
    checks.blank(blank, C)
    return logits


def check_options(logits: Tensor, label_priors: Any, prior_scale: Any, star: Any) -> Any:
    """Return the star as an int, or raise for a bad option of the scores."""
    C = logits.shape[2]
    if label_priors is not None:
        checks.floating("label_priors", label_priors)
        checks.shape("label_priors", label_priors, (C,), "[C]")
        checks.device("label_priors", label_priors, logits, "log_probs")
    checks.number("prior_scale", prior_scale, low=0.0)
    if star is None:
        return None
    checks.python_int("star", star)
    if star < C:
        raise ValueError(f"star: expected an index of at least C = {C}, got {star}")
    if star >= 2**63:
        raise ValueError(f"star: expected an index of int64, got {star}")
    return star if isinstance(star, torch.SymInt) else int(star)


def _order_hint(per_sequence: Any, T: int) -> str:
    """Return what helps where there are as many targets or lengths as the first dimension has."""
    is_scalar = isinstance(per_sequence, Tensor) and per_sequence.ndim == 0
    if not isinstance(per_sequence, Sized) or is_scalar or len(per_sequence) != T:
        return ""
    transposed = "log_probs.transpose(0, 1) makes that of batch-first scores"
    return f"; log_probs is [T, N, C], and {transposed}"


def _row_offsets(N: int, size: int, device: torch.device) -> Tensor:
    """Return where each row of padded targets `[N, size]` starts.

    On a GPU it is made once for each stream, whose launches come after it. A captured graph gets
    its own, which nothing else frees.
    """
    is_cached = device.type == "cuda" and plain_eager()
    if not is_cached or torch.cuda.is_current_stream_capturing():
        return torch.arange(N, device=device) * size
    index = device.index
    key = N, size, index, private_names.current_raw_stream(index)
    offsets = _cached_offsets.get(key)
    if offsets is None:
        # A tensor that is made in inference mode cannot be saved for a gradient later.
        with torch.inference_mode(False):
            offsets = _cached_offsets.store(key, torch.arange(N, device=device) * size)
    return offsets


def _lengths(name: str, value: Lengths, N: int) -> Tensor:
    """Return the lengths as int64 `[N]` on the device that they are on."""
    if (
        isinstance(value, Tensor)
        and value.dtype is torch.int64
        and value.layout is torch.strided
        and value.ndim == 1
        and holds(value.shape[0] == N)
        and value.is_contiguous()
    ):
        return value
    return as_lengths(name, value, N)
