"""Sample calls of functions over a vocabulary that a process group shares.

They need a group, such as one of this process alone. `partita.testing.samples` has them apart, as
their import loads `torch.distributed`.

Example:
    >>> import torch.distributed as dist
    >>> from partita.testing.samples import Draw
    >>> from partita.testing.samples.shards import CALLS
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> CALLS["parallel.cross_entropy"].sample(Draw()).run()[0].shape
    torch.Size([6])
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

from dataclasses import replace

from ... import parallel
from . import heads, rows
from .call import Call, Draw, Inputs, Sizes

_OPTIONS = {
    "cross_entropy": ("mean", "sum", "all options", "all options, mean"),
    "token_stats": (),
    "support_stats": ("temperature and softcap", "many ids"),
    "logprobs": ("temperature and softcap",),
    "divergence": tuple(rows.SOFT),
    "linear_cross_entropy": ("mean", "bias, all options", "lean", "fp32 logits"),
    "linear_support_stats": ("many ids", "bias, all options, lean"),
    "linear_logprobs": ("fp32 logits",),
    "linear_divergence": (*rows.SOFT, "fp32 logits"),
}
_WHOLE = {call.name: call for call in (*rows.CALLS, *heads.CALLS)}


def _parallel(name: str) -> Call:
    """Return the entry of the function over shards from the entry of the one with all classes."""
    call = _WHOLE[name]

    def inputs(draw: Draw, sizes: Sizes) -> Inputs:
        inputs = call.inputs(draw, sizes)
        if name == "linear_logprobs":  # The function over shards ignores no ids.
            del inputs["ignore_index"]
            inputs["ids"] = inputs["ids"].clamp(min=0)
        return inputs

    return replace(
        call,
        name=f"parallel.{name}",
        function=getattr(parallel, name),
        inputs=inputs,
        usual={},
        options={option: call.options[option] for option in _OPTIONS[name]},
        uncounted=None if name == "linear_logprobs" else call.uncounted,
        mixtures=(),
        second_derivatives=False,
    )


CALLS: dict[str, Call] = {f"parallel.{name}": _parallel(name) for name in _OPTIONS}
"""Every entry by name."""
