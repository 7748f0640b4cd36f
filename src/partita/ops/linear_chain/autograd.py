"""The registered ops of dense linear chains and their autograd functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...runtime import checks, register
from . import fakes
from .backends import BACKENDS


def check_values(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    *_: Any,
) -> None:
    """Raise for a length that is out of range, where values are checked."""
    if lengths is not None:
        checks.within("lengths", lengths, 1, emissions.shape[0], "tokens")


_CHAIN = "Tensor emissions, Tensor transitions, Tensor? start, Tensor? end, Tensor? lengths"

# It returns log Z [N] fp64, the same in the dtype of results, and what its gradient needs.
logz = register.define(
    f"linear_chain_logz({_CHAIN}, bool save, str backend) -> (Tensor, Tensor, Tensor)",
    fakes.fake_logz,
    check=check_values,
    fake_by_backend=True,
    backends=BACKENDS,
)
# It returns the gradients of sum(grad_output * log Z) in emissions, transitions, start and end.
logz_gradient = register.define(
    f"linear_chain_gradient(Tensor grad_output, {_CHAIN}, Tensor logz, Tensor saved,"
    " bool need_transitions, bool per_sequence, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    fakes.fake_gradient,
    backends=BACKENDS,
)
# It returns the best score [N] and the states of the best path [T, N].
viterbi = register.define(
    f"linear_chain_viterbi({_CHAIN}, str backend) -> (Tensor, Tensor)",
    fakes.fake_viterbi,
    check=check_values,
    backends=BACKENDS,
)
# It takes uniform numbers [T, k, N] fp64 and returns states [k, T, N].
sample = register.define(
    f"linear_chain_sample({_CHAIN}, Tensor uniforms, str backend) -> Tensor",
    fakes.fake_sample,
    check=check_values,
    backends=BACKENDS,
)
# It returns the derivative of log Z in the direction of the values [N], and the derivative in that
# direction of the gradients of sum(grad_output * log Z), all in fp64.
tangent = register.define(
    f"linear_chain_tangent(Tensor grad_output, {_CHAIN}, Tensor emission_values,"
    " Tensor transition_values, Tensor? start_values, Tensor? end_values, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fakes.fake_tangent,
    check=None,
    backends=BACKENDS,
)
