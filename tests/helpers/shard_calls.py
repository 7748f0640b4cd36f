"""Sample calls of functions over a vocabulary that a process group shares.

They need a group, such as one of this process alone.
"""

from dataclasses import replace

from partita import parallel
from partita.testing.samples import heads, rows
from partita.testing.samples.call import Call, Draw, Inputs, Sizes

LOW_RANK = ("low rank", "low rank, lean")
_OPTIONS = {
    "cross_entropy": ("mean", "sum", "all options", "all options, mean"),
    "token_stats": (),
    "support_stats": ("temperature and softcap", "many ids"),
    "logprobs": ("temperature and softcap",),
    "divergence": tuple(rows.SOFT),
    "distillation_loss": tuple(rows.DISTILLATION),
    "linear_cross_entropy": ("mean", "bias, all options", "lean", "fp32 logits", *LOW_RANK),
    "linear_support_stats": ("many ids", "bias, all options, lean", *LOW_RANK),
    "linear_logprobs": ("fp32 logits", "low rank"),
    "linear_divergence": (*rows.SOFT, "fp32 logits", "low rank"),
    "linear_distillation_loss": (*rows.DISTILLATION, "low rank, mean"),
}
_WHOLE = {call.name: call for call in (*rows.CALLS, *heads.CALLS)}


def _parallel(name: str) -> Call:
    """Return the entry of the function over shards from the entry of the one with all classes."""
    call, function = _WHOLE[name], getattr(parallel, name)
    if name.startswith("linear_"):
        function = heads.with_low_rank(function)

    def inputs(draw: Draw, sizes: Sizes) -> Inputs:
        inputs = call.inputs(draw, sizes)
        if name == "linear_logprobs":  # The function over shards ignores no ids.
            del inputs["ignore_index"]
            inputs["ids"] = inputs["ids"].clamp(min=0)
        return inputs

    return replace(
        call,
        name=f"parallel.{name}",
        function=function,
        inputs=inputs,
        usual={},
        options={option: call.options[option] for option in _OPTIONS[name]},
        uncounted=None if name == "linear_logprobs" else call.uncounted,
        mixtures=(),
        second_derivatives=False,
    )


SHARDS: dict[str, Call] = {f"parallel.{name}": _parallel(name) for name in _OPTIONS}
