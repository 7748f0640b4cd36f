"""The potentials of dense linear chains, checks of what users give, and shapes of results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...paths.inputs import equal_lengths, steps_first
from ...primitives.gpu.target import assumed
from ...runtime import checks
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import same_sizes

RANGE_ROWS = 16  # states whose transitions one part of the search for the range reads

# Triton 3.6 compiles products of fp64 matrices for NVIDIA GPUs only, and the scans choose layouts.
HAS_KERNELS = assumed.vendor == "nvidia"


class LinearChainPotentials(NamedTuple):
    """A batch of dense linear chains in the order of arguments of the registered ops.

    Fields:
        emissions: `[T, N, C]` floating, any strides, T at least 1.
        transitions: `[C, C]`, `[T - 1, C, C]` or `[T - 1, N, C, C]`, from and to, any strides.
            Log Z and its gradient also take `[1, N, C, C]`: those of a sequence at all its steps.
        start, end: the scores of the first and of the last state, `[N, C]`; None for zeros.
        lengths: the number of tokens of each sequence, `[N]` integers; None for T.
    """

    emissions: Tensor
    transitions: Tensor
    start: Tensor | None
    end: Tensor | None
    lengths: Tensor | None

    @property
    def variables(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the differentiable tensors."""
        return self.emissions, self.transitions, self.start, self.end

    def in_full_precision(self) -> LinearChainPotentials:
        """Return the potentials in dtypes whose gradients are as exact as the results."""
        dtype = acc_dtype(self.emissions.dtype)
        scores = (
            None if x is None else x.to(torch.promote_types(x.dtype, dtype)) for x in self.variables
        )
        return LinearChainPotentials._make([*scores, self.lengths])

    def aligned_with(
        self, other: LinearChainPotentials
    ) -> tuple[LinearChainPotentials, LinearChainPotentials, Tensor]:
        """Return both in the same shapes, and where their lengths are equal, `[N]`."""
        p, q, same = self, other, equal_lengths(self, other)
        if p.transitions.ndim != q.transitions.ndim:
            p, q = p.of_sequences(), q.of_sequences()
        return p, q, same

    def of_sequences(self) -> LinearChainPotentials:
        """Return the potentials with transitions `[T - 1, N, C, C]`, a view without such memory."""
        T, N, C = self.emissions.shape
        steps = self.transitions.unsqueeze(1) if self.transitions.ndim == 3 else self.transitions
        return self._replace(transitions=steps.expand(T - 1, N, C, C))

    def with_ends(self) -> LinearChainPotentials:
        """Return the potentials with zeros for ends that are None."""
        # Each end is a tensor of its own: compilers refuse one tensor for two arguments.
        zero = scalar(0.0, acc_dtype(self.emissions.dtype), self.emissions.device)
        shape = self.emissions.shape[1:]
        start, end = (zero.expand(shape) if x is None else x for x in (self.start, self.end))
        return self._replace(start=start, end=end)


class LinearChainValues(NamedTuple):
    """Values in the shapes of the potentials, whose sum over a path is averaged; None for zeros.

    For constant transitions, `transition_values` may also be `[N, C, C]`.
    """

    emission_values: Tensor
    transition_values: Tensor
    start_values: Tensor | None
    end_values: Tensor | None


def is_constant(transitions: Tensor, T: int) -> bool:
    """Return whether the steps of a sequence share their transitions."""
    return transitions.ndim == 2 or (transitions.ndim == 4 and len(transitions) < T - 1)


def check_linear_chain(emissions: Tensor, transitions: Tensor, batch_first: bool) -> Tensor:
    """Return the emissions as `[T, N, C]`, or raise for a wrong dtype, shape or device."""
    emissions = steps_first(emissions, batch_first)
    checks.floating("transitions", transitions)
    checks.device("transitions", transitions, emissions, "emissions")
    T, N, C = emissions.shape
    shapes = {2: (C, C), 3: (T - 1, C, C), 4: (T - 1, N, C, C)}
    if not same_sizes(transitions.shape, shapes.get(transitions.ndim, (-1,))):
        raise ValueError(
            "transitions: expected shape [C, C], [T - 1, C, C] or [T - 1, N, C, C] with"
            f" [T, N, C] = {[T, N, C]}, got {list(transitions.shape)}"
        )
    return emissions


def saved_sizes(T: int, N: int, C: int, save: bool) -> list[int]:
    """Return the sizes of the parts of `gpu.arguments.Saved`; without `save`, of its work."""
    return [2 * T * N * C if save else 0, T * N, T * N, 2 * N * -(-C // RANGE_ROWS)]


def _fp64(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.float64)


def _end_gradient(end: Tensor | None, emissions: Tensor, dtype: torch.dtype | None) -> Tensor:
    if end is None:
        return emissions.new_empty(0, dtype=dtype)
    return end.new_empty(end.shape, dtype=dtype or end.dtype)


def fake_logz(emissions: Tensor, save: bool, served_by: str) -> tuple[Tensor, Tensor, Tensor]:
    T, N, C = emissions.shape
    rounded = emissions.new_empty(N, dtype=acc_dtype(emissions.dtype))
    saved: tuple[int, ...] = (T, N, C)  # of the backend for the CPU
    if not save or served_by == "reference" or (served_by == "gpu" and not HAS_KERNELS):
        saved = (0,)
    elif served_by == "gpu":
        saved = (sum(saved_sizes(T, N, C, True)),)
    return _fp64(emissions, N), rounded, _fp64(emissions, *saved)


def fake_gradient(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    need_transitions: bool,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, C = emissions.shape[1:]
    if not need_transitions:
        d_transitions = transitions.new_empty(0)
    elif per_sequence and transitions.ndim == 2:
        d_transitions = transitions.new_empty((N, C, C), dtype=acc_dtype(transitions.dtype))
    else:
        d_transitions = transitions.new_empty(transitions.shape)
    return (
        emissions.new_empty(emissions.shape),
        d_transitions,
        _end_gradient(start, emissions, None),
        _end_gradient(end, emissions, None),
    )


def fake_viterbi(emissions: Tensor) -> tuple[Tensor, Tensor]:
    T, N, _C = emissions.shape
    score = emissions.new_empty(N, dtype=acc_dtype(emissions.dtype))
    return score, emissions.new_empty((T, N), dtype=torch.int64)


def fake_nbest(emissions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    T, N, _ = emissions.shape
    return _fp64(emissions, k, N), emissions.new_empty((k, T, N), dtype=torch.int64)


def fake_sample(emissions: Tensor, uniforms: Tensor) -> Tensor:
    T, N, _ = emissions.shape
    return emissions.new_empty((uniforms.shape[1], T, N), dtype=torch.int64)


def fake_tangent(
    emissions: Tensor, transitions: Tensor, start: Tensor | None, end: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        _fp64(emissions, emissions.shape[1]),
        _fp64(emissions, *emissions.shape),
        _fp64(emissions, *transitions.shape),
        _end_gradient(start, emissions, torch.float64),
        _end_gradient(end, emissions, torch.float64),
    )
