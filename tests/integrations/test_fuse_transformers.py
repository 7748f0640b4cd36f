"""Fused models of transformers themselves, beside their stock loss; and their Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.causal_lm import INPUT_IDS, LABELS, step, tokens
from helpers.configurations import SERVED_BY_NAME, model_of
from torch import Tensor, nn

from partita.integrations.transformers import fuse, fused, unfuse

transformers = pytest.importorskip("transformers", exc_type=ImportError)

LLAMA = "LlamaForCausalLM"
FAMILIES = (LLAMA, "Qwen2ForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM")
FAMILIES += ("GraniteForCausalLM", "MixtralForCausalLM")
families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("items", [None, torch.tensor(9)], ids=str)
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_loss_and_gradients(family: str, items: Tensor | None, shifted: bool) -> None:
    model = model_of(SERVED_BY_NAME[family])
    arguments = {"num_items_in_batch": items}
    if shifted:
        arguments["shift_labels"] = LABELS.roll(2, 1)
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


def train(
    folder: Path, is_fused: bool, batch: int = 3, **arguments: Any
) -> tuple[Any, list[float]]:
    """Train a model with the Trainer, and return it with its losses."""
    model = model_of(SERVED_BY_NAME["Gemma2ForCausalLM"])
    if is_fused:
        fuse(model)
    rows = [tokens(seed) for seed in range(4)]
    examples = [
        {"input_ids": ids, "labels": labels}
        for batch in rows
        for ids, labels in zip(*batch, strict=True)
    ]
    for i, example in enumerate(examples):  # another number of labels in each
        example["labels"] = example["labels"].masked_fill(torch.arange(7) < i % 6, -100)
    settings = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
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
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=["plain", "accumulation", "bf16", "smoothing", "compiled"],
)
def test_trainer(tmp_path: Path, arguments: dict[str, Any]) -> None:
    pytest.importorskip("accelerate", exc_type=ImportError)
    torch._dynamo.reset()
    stock, expected = train(tmp_path, False, **arguments)
    model, found = train(tmp_path, True, **arguments)
    half = "bf16" in arguments
    assert found == pytest.approx(expected, rel=2e-2 if half else 1e-3)
    if not half:
        for a, b in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    model.train()
    assert model(INPUT_IDS, labels=LABELS).logits is None, "the Trainer leaves the model fused"


def test_the_loss_of_a_trainer_does_not_depend_on_accumulation(tmp_path: Path) -> None:
    """The Trainer gives the number of labels of all parts, so that their sums are one mean."""
    pytest.importorskip("accelerate", exc_type=ImportError)
    whole, expected = train(tmp_path, True, batch=6)
    parts, found = train(tmp_path, True, batch=3, gradient_accumulation_steps=2)
    assert found == pytest.approx(expected, rel=1e-4)
    assert fused(whole).fused == 3 and fused(parts).fused == 6
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_smoothing_of_the_trainer_is_ours() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model = model_of(SERVED_BY_NAME[LLAMA])
    logits = {"logits": model(INPUT_IDS).logits}
    expected = LabelSmoother(0.1)(logits, LABELS, shift_labels=True)
    found = fuse(model, label_smoothing=0.1)(INPUT_IDS, labels=LABELS)
    torch.testing.assert_close(found.loss, expected)
