"""The catalogue of calls: sample calls of every public function, as PyTorch's `op_db` has them.

Tests, `partita check` and `partita warm` walk it. A kernel of your own can be tried on the same
inputs.

Example:
    >>> import torch
    >>> from partita.testing.samples import CALLS, Draw
    >>> call = CALLS["cross_entropy"]
    >>> [sample.name for sample in call.samples(Draw(torch.bfloat16))][:3]
    ['small', 'mean', 'sum']
    >>> [loss] = call.sample(Draw(torch.bfloat16), "softcap").run()
    >>> loss.shape, loss.dtype
    (torch.Size([6]), torch.bfloat16)
"""

from . import alignments, chains, heads, pairs, rows
from .call import ALL_DTYPES, Bound, Call, Draw, Sample, map_tensors, tensors_of
from .recorded import OpCall, recorded_ops

_FAMILIES = (rows, heads, pairs, chains, alignments)
CALLS: dict[str, Call] = {call.name: call for family in _FAMILIES for call in family.CALLS}
"""Every entry by name."""

__all__ = [
    "ALL_DTYPES",
    "CALLS",
    "Bound",
    "Call",
    "Draw",
    "OpCall",
    "Sample",
    "map_tensors",
    "recorded_ops",
    "tensors_of",
]
