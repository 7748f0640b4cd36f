"""The matrix, the bias and the factors of low rank of a head that PEFT may have wrapped.

The classes of PEFT are known by their names, so that it is not imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..runtime.checks import FLOATING
from .shards import PLAN, is_sharded

LORA = "peft.tuners.lora.layer.Linear"
SAVED = "peft.utils.other.ModulesToSaveWrapper"


class HeadParts(NamedTuple):
    """What a head computes logits from."""

    weight: Tensor  # [C, H]
    bias: Tensor | None  # [C]
    low_rank: tuple[Tensor, Tensor] | None  # [..., r] and [C, r]


def check_head(head: Any) -> None:
    """Raise unless this is a linear layer, LoRA around one, or a copy that PEFT saves of one."""
    kind, layers = name_of(head), [head]
    if kind == LORA:
        if head.lora_variant or head.quantization_backend is not None:
            what = [type(variant).__name__ for variant in head.lora_variant.values()]
            raise TypeError(
                "model: expected LoRA on the head without variants (DoRA) and quantization, got"
                f" {what or type(head.quantization_backend).__name__}"
            )
        layers = [head.base_layer]
    elif kind == SAVED:
        layers = [head.original_module, *head.modules_to_save.values()]
    for layer in layers:
        is_linear = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
        if not is_linear or layer.weight.dtype not in FLOATING:
            raise TypeError(
                "model: expected a head that is a torch.nn.Linear, or LoRA or modules_to_save of"
                f" PEFT around one, without quantization and other adapters, got {name_of(layer)}"
            )
        own = vars(layer).get("forward") or vars(head).get("forward")
        if own is not None and not (own.__module__ == PLAN and is_sharded(layer.weight)):
            raise TypeError("model: expected a head with its own forward, got one that is replaced")


def head_parts(head: Any, hidden_states: Tensor) -> HeadParts:
    """Return what the head computes logits of the hidden states from, as its adapters are now."""
    kind = name_of(head)
    if kind == SAVED:
        is_original = head.disable_adapters or not head.active_adapters
        chosen = None if is_original else head.modules_to_save[head.active_adapters[0]]
        head = head.original_module if chosen is None else chosen
    if kind != LORA:
        return HeadParts(head.weight, head.bias, None)
    if head.disable_adapters and head.merged:
        head.unmerge()  # as PEFT's own forward pass does
    base, active = head.base_layer, []
    if not head.disable_adapters and not head.merged:
        active = [name for name in head.active_adapters if name in head.lora_A]
    weight, bias, states, factors = base.weight, base.bias, [], []
    for name in active:
        if name in head.lora_variant:
            raise TypeError(
                f"model: expected LoRA without variants on the head, got that of {name}"
            )
        A, B, scale = head.lora_A[name], head.lora_B[name], head.scaling[name]
        x = hidden_states.to(A.weight.dtype) if head.cast_input_dtype_enabled else hidden_states
        states.append(A(head.lora_dropout[name](x)) * scale)
        factors.append(B.weight)
        if B.bias is not None:
            of_adapter = (B.bias * scale).to(weight.dtype)
            bias = of_adapter if bias is None else bias + of_adapter
    if not active:
        return HeadParts(weight, bias, None)
    if len(active) == 1:
        return HeadParts(weight, bias, (states[0], factors[0]))
    return HeadParts(weight, bias, (torch.cat(states, -1), torch.cat(factors, 1)))


def name_of(module: Any) -> str:
    """Return the name of the class, from which `fully_shard` derives another one."""
    kind, bases = type(module), type(module).__bases__
    if bases[0].__module__.startswith("torch.distributed.") and len(bases) == 2:
        kind = bases[1]
    return f"{kind.__module__}.{kind.__qualname__}"
