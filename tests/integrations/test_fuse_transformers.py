"""Fused models of transformers themselves, beside their stock loss; and their Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.causal_lm import INPUT_IDS, LABELS, step, tokens
from helpers.configurations import SERVED_BY_NAME, model_of
from torch import nn

from partita.integrations.transformers import fuse, fused, unfuse

transformers = pytest.importorskip("transformers", exc_type=ImportError)

LLAMA = "LlamaForCausalLM"
# Each has a form of the head of its own. `test_fuse_configurations` has a step of every family.
FAMILIES = (LLAMA, "Gemma2ForCausalLM", "GPT2LMHeadModel", "GraniteForCausalLM")
FAMILIES += ("MixtralForCausalLM",)
families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_shifted_labels_and_their_number(family: str) -> None:
    model = model_of(SERVED_BY_NAME[family])
    arguments = {"shift_labels": LABELS.roll(2, 1), "num_items_in_batch": torch.tensor(9)}
    expected, gradients = step(model, **arguments)
    found, others = step(fuse(model), **arguments)
    assert expected.logits is not None and found.logits is None
    assert found.loss.dtype == expected.loss.dtype
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-6)


@families
def test_evaluation_generation_and_calls(family: str) -> None:
    model = model_of(SERVED_BY_NAME[family])
    model.config.output_router_logits = False  # Mixtral cannot generate with them.
    model.eval()
    expected = model(INPUT_IDS, labels=LABELS)
    written = model.generate(INPUT_IDS, max_new_tokens=3, do_sample=False)
    fuse(model)
    found = model(INPUT_IDS, labels=LABELS)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    assert torch.equal(model.generate(INPUT_IDS, max_new_tokens=3, do_sample=False), written)
    assert model(INPUT_IDS, labels=LABELS, skip_logits=True).logits is None
    model.train()
    loss, logits, *_ = model(INPUT_IDS, labels=LABELS, return_dict=False)
    torch.testing.assert_close(loss, expected.loss)
    assert logits is None
    shifted = nn.functional.pad(LABELS, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(INPUT_IDS, shift_labels=shifted).loss, expected.loss)
    output = model(INPUT_IDS, labels=LABELS, output_hidden_states=True)
    assert output.logits is None and len(output.hidden_states) == 2
    assert unfuse(model)(INPUT_IDS, labels=LABELS).logits is not None


@pytest.mark.usefixtures("fresh_dynamo")
@families
def test_compiled(family: str) -> None:
    model = fuse(model_of(SERVED_BY_NAME[family]))
    expected, gradients = step(model)
    found, others = step(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_and_autocast() -> None:
    model = model_of(SERVED_BY_NAME[LLAMA])
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = step(model)
        model.gradient_checkpointing_enable()
        found, others = step(fuse(model))
    torch.testing.assert_close(found.loss, expected.loss, rtol=0.02, atol=0)
    torch.testing.assert_close(others, gradients, rtol=0.1, atol=2e-3)


def train(folder: Path, is_fused: bool, **arguments: Any) -> tuple[Any, list[float]]:
    """Train a model with the Trainer, and return it with its losses."""
    model = model_of(SERVED_BY_NAME["Gemma2ForCausalLM"])
    if is_fused:
        fuse(model)
    rows = [row for seed in range(4) for row in zip(*tokens(seed), strict=True)]
    examples = [  # another number of labels in each
        {"input_ids": ids, "labels": labels.masked_fill(torch.arange(7) < i % 6, -100)}
        for i, (ids, labels) in enumerate(rows)
    ]
    settings = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=3,
        per_device_eval_batch_size=3,
        max_steps=3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=0.01,
        **arguments,
    )
    trainer = transformers.Trainer(
        model, settings, train_dataset=examples, eval_dataset=examples[:3]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model, [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize(
    ("arguments", "passes"),
    [
        ({}, 3),
        ({"gradient_accumulation_steps": 2}, 6),
        ({"bf16": True}, 3),
        ({"label_smoothing_factor": 0.1}, 0),  # The Trainer computes this loss from logits.
        ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, 0),  # which are not counted
    ],
    ids=["plain", "accumulation", "bf16", "smoothing", "compiled"],
)
def test_trainer(tmp_path: Path, arguments: dict[str, Any], passes: int) -> None:
    pytest.importorskip("accelerate", exc_type=ImportError)
    torch._dynamo.reset()
    stock, expected = train(tmp_path, False, **arguments)
    model, found = train(tmp_path, True, **arguments)
    half = "bf16" in arguments
    assert found == pytest.approx(expected, rel=2e-2 if half else 1e-3)
    if not half:
        for a, b in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert fused(model).fused == passes
    model.train()
    assert model(INPUT_IDS, labels=LABELS).logits is None, "the Trainer leaves the model fused"


def test_the_smoothing_of_the_trainer_is_ours() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model = model_of(SERVED_BY_NAME[LLAMA])
    logits = {"logits": model(INPUT_IDS).logits}
    expected = LabelSmoother(0.1)(logits, LABELS, shift_labels=True)
    found = fuse(model, label_smoothing=0.1)(INPUT_IDS, labels=LABELS)
    torch.testing.assert_close(found.loss, expected)
