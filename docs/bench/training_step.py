"""Time a training step of a small Llama with several losses on a GPU, and write a table.

    python docs/bench/training_step.py --out docs/bench/training_step.csv
    python docs/bench/training_step.py --trl --out trl_step.csv  # SFT and DPO with TRL's fused head
    python docs/bench/training_step.py --lora --out lora_step.csv  # PEFT's LoRA of rank 16

The model has 12 layers of width 1,024 and a vocabulary of 128,256, random weights in bf16, and no
shared matrix. A step takes 8 sequences of 2,048 tokens through forward pass, backward pass and
AdamW. The time is the median of the steps, and the memory is the peak of all that is allocated.
Liger's patch is timed where liger-kernel is installed. A step of DPO has a reference model, and
half of the tokens are those of answers. LoRA adapts all linear layers, with or without the head.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from partita.integrations import trl
from partita.integrations.transformers import causal_lm_loss, fuse

SEQUENCES, TOKENS, VOCABULARY = 8, 2048, 128256
WARM_UP = 4
GIB = 2**30
COLUMNS = ("provider", "ms", "gib", "loss", "machine", "torch", "transformers")


def llama() -> Any:
    """Return a model with random weights, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).train()


def with_liger(model: Any) -> Any:
    """Replace the loss alone, as Partita does."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=False,
        rms_norm=False,
        swiglu=False,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
        model=model,
    )
    return model


def with_causal_lm_loss(model: Any) -> Any:
    model.loss_function = causal_lm_loss
    return model


def with_trl_sft(model: Any, patched: bool) -> Any:
    """Give a model the fused head that SFTTrainer gives it."""
    from trl.trainer.utils import add_fused_lm_head

    (trl.patch if patched else trl.unpatch)()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    model.forward = functools.partial(model.forward, fused_lm_head=True)
    return model


def with_trl_dpo(model: Any, patched: bool) -> Any:
    """Give a model the fused head and the loss of DPOTrainer."""
    from trl.trainer.utils import add_fused_lm_head

    (trl.patch if patched else trl.unpatch)()
    reference = llama().requires_grad_(False)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    add_fused_lm_head(reference)
    forward = model.forward

    def loss(input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        labels = labels.clone()
        labels[:, : TOKENS // 2] = -100
        call = {"input_ids": input_ids, "labels": labels, "fused_lm_head": True, **kwargs}
        policy = forward(**call).log_probs.sum(1)
        with torch.no_grad():
            margin = reference(**call).log_probs.sum(1)
        chosen, rejected = (policy - margin).chunk(2)
        return SimpleNamespace(
            loss=-torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
        )

    model.forward = loss
    return model


def with_lora(model: Any, head: bool, fused: bool) -> Any:
    """Freeze a model, and give all its linear layers adapters of PEFT."""
    from peft import LoraConfig, get_peft_model

    layers = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    names = layers if head else [name for name in layers if name != "lm_head"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names))
    return fuse(model) if fused else model


PROVIDERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda model: model,
    "causal_lm_loss": with_causal_lm_loss,
    "fuse": fuse,
    "liger": with_liger,
}
OF_TRL: dict[str, Callable[[Any], Any]] = {
    f"{name}_{task}": functools.partial(change, patched=name == "patched")
    for task, change in (("sft", with_trl_sft), ("dpo", with_trl_dpo))
    for name in ("trl", "patched")
}
OF_LORA: dict[str, Callable[[Any], Any]] = {
    f"{name}{suffix}": functools.partial(with_lora, head=head, fused=name == "fuse")
    for suffix, head in (("", False), ("_head", True))
    for name in ("peft", "fuse")
}


def measured(model: Any, steps: int) -> dict[str, Any]:
    """Return the median time of a step, the peak of the memory and the first loss."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (SEQUENCES, TOKENS)
    ids = torch.randint(VOCABULARY, shape, device="cuda", generator=generator)
    times, losses = [], []
    for i in range(WARM_UP + steps):
        if i == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        losses.append(float(loss.detach()))
    return {
        "ms": f"{statistics.median(times[WARM_UP:]):.1f}",
        "gib": f"{torch.cuda.max_memory_allocated() / GIB:.1f}",
        "loss": f"{losses[0]:.4f}",
    }


def lines(steps: int, providers: dict[str, Callable[[Any], Any]]) -> Iterator[dict[str, Any]]:
    """Measure the providers that are installed, one after another."""
    import transformers

    for provider, change in providers.items():
        if provider == "liger" and importlib.util.find_spec("liger_kernel") is None:
            print("liger: not installed (pip install liger-kernel)", flush=True)
            continue
        found = measured(change(llama()), steps)
        gc.collect()  # a model refers to itself, and the next one's peak would include it
        torch.cuda.empty_cache()
        yield {
            "provider": provider,
            **found,
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the table to write")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--trl", action="store_true", help="time the fused head of TRL instead")
    parser.add_argument("--lora", action="store_true", help="time adapters of PEFT instead")
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        providers = OF_LORA if args.lora else OF_TRL if args.trl else PROVIDERS
        for line in lines(args.steps, providers):
            writer.writerow(line)
            file.flush()
            print(*(f"{key} {line[key]}" for key in COLUMNS[:4]), flush=True)


if __name__ == "__main__":
    main()
