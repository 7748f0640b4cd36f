"""The potentials of a batch of dense linear chains, and the checks of what users give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...paths.inputs import steps_first
from ...runtime import checks
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import same_sizes


class LinearChainPotentials(NamedTuple):
    """A batch of dense linear chains in the order of arguments of the registered ops.

    Fields:
        emissions: `[T, N, C]` floating, any strides, T at least 1.
        transitions: `[C, C]`, `[T - 1, C, C]` or `[T - 1, N, C, C]`, from and to, any strides.
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
