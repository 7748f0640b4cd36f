"""The hooks of docs/post_training.md, called as TRL 1.16 and verl 0.9.1 call them.

The stand-ins have the calls and the signatures of these packages. The last test compares the
signatures, and those that docs/migrate/trl.md names, where the packages are installed.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import partita

TEMPERATURE, CLASSES, WIDTH = 0.7, 50, 16
MATRIX = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
EMBEDDING = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
PROMPTS = [[4, 8], [15], [16, 23, 42]]
ANSWERS = [[7, 3], [9], [7, 21, 4]]
MASKS = [[[7, 3, 40], [3, 8]], [[9, 7]], [[40, 7], [21, 6, 8, 9], [4]]]
PAGE = Path(__file__).parents[2] / "docs" / "post_training.md"


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    """Return what the blocks of the page define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    return names


def fused_head(head: Any, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Call the head as the forward pass of a model with TRL's fused head does on a GPU."""
    states, labels = EMBEDDING[input_ids][:, :-1], labels[:, 1:]
    mask = labels != -100
    outputs = ("log_probs", "entropy")
    found = head.apply(
        states[mask], MATRIX, None, labels[mask], TEMPERATURE, 256, None, 1.0, outputs
    )
    assert len(found) == 5 and found[2:] == (None, None, None)
    first, second = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in found[:2])
    return first, second


class GRPOTrainer:
    """What the hook overrides of `trl.GRPOTrainer`."""

    head: Any  # `trl.trainer.utils._ChunkedLogProbFunction`

    def _generate(self, prompts: list[list[int]]) -> tuple[Any, ...]:
        fields = {"sampling_mask": MASKS}
        return prompts, ANSWERS, None, ["text"] * len(prompts), None, fields, None, []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found = self._generate([each["prompt"] for each in inputs])
        prompts, answers = ([torch.tensor(ids) for ids in lists] for lists in found[:2])
        output = {}
        for name, lists, side in (("prompt", prompts, "left"), ("completion", answers, "right")):
            ids, ones = (
                pad_sequence(rows, batch_first=True, padding_side=side)
                for rows in (lists, [torch.ones_like(ids) for ids in lists])
            )
            output |= {f"{name}_ids": ids, f"{name}_mask": ones}
        old, _, _ = self._get_per_token_logps_and_entropies(
            None, *self.inputs(output), batch_size=2
        )
        return {**output, "old_per_token_logps": old}

    def inputs(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        ids, mask = (
            torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask")
        )
        return ids, mask, batch["completion_ids"].size(1)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        logp, entropy, _ = self._get_per_token_logps_and_entropies(
            model, *self.inputs(inputs), compute_entropy=True
        )
        assert entropy.shape == logp.shape
        return (logp - inputs["old_per_token_logps"]).exp()

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
    ) -> tuple[Tensor, Tensor, None]:
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-logits_to_keep] = -100
        size = batch_size or len(input_ids)
        parts = zip(input_ids.split(size), labels.split(size), strict=True)
        found = [fused_head(self.head, *part) for part in parts]
        logp, entropy = (torch.cat(x)[:, -logits_to_keep:] for x in zip(*found, strict=True))
        return logp, entropy, None


def test_recorded_classes_in_trl(hooks: dict[str, Any]) -> None:
    """The classes follow their answers when TRL shuffles and cuts the batch."""
    trainer = type("Trainer", (hooks["RecordedSets"], GRPOTrainer), {})()
    trainer.head = hooks["RecordedHead"]
    batch = trainer._generate_and_score_completions([{"prompt": ids} for ids in PROMPTS])
    before = [[ids[-1], *answer[:-1]] for ids, answer in zip(PROMPTS, ANSWERS, strict=True)]
    for row, (inputs, answer, mask) in enumerate(zip(before, ANSWERS, MASKS, strict=True)):
        for place, kept in enumerate(mask):
            logits = MATRIX[kept] @ EMBEDDING[inputs[place]] / TEMPERATURE
            expected = logits.log_softmax(0)[kept.index(answer[place])]
            torch.testing.assert_close(batch["old_per_token_logps"][row, place], expected)
    for rows in ([2, 0], [1]):
        part = {name: x[torch.tensor(rows)] for name, x in batch.items()}
        assert (trainer._compute_loss(None, part) == 1).all()


def test_heads_of_trl(hooks: dict[str, Any]) -> None:
    states = torch.randn(9, WIDTH)
    tokens, bias = torch.randint(CLASSES, (9,)), torch.randn(CLASSES)
    logits = states @ MATRIX.T + bias
    outputs = ("log_probs", "entropy")
    truncated, recorded = hooks["TruncatedHead"], hooks["RecordedHead"]
    recorded.rows = None  # what a test before this one has left
    expected = {
        truncated: partita.truncated_stats(
            logits, tokens, temperature=TEMPERATURE, **truncated.rules
        ),
        recorded: partita.token_stats(logits, tokens, temperature=TEMPERATURE),
    }
    for head, stats in expected.items():
        found = head.apply(states, MATRIX, bias, tokens, TEMPERATURE, 256, None, 1.0, outputs)
        torch.testing.assert_close(found[:2], (stats.logprob, stats.entropy))
        assert found[2:] == (None, None, None)


def test_heads_of_verl(hooks: dict[str, Any]) -> None:
    states, labels = torch.randn(2, 5, WIDTH), torch.randint(CLASSES, (2, 5))
    plain, truncated = hooks["Fp32Head"], hooks["TruncatedFp32Head"]
    logits, options = states @ MATRIX.T, {"temperature": TEMPERATURE}
    expected = {
        plain: partita.token_stats(logits, labels, **options),
        truncated: partita.truncated_stats(logits, labels, **truncated.rules, **options),
    }
    for head, stats in expected.items():
        found = head(impl_backend="torch").forward(
            hidden_states=states, vocab_weights=MATRIX, input_ids=labels, temperature=TEMPERATURE
        )
        torch.testing.assert_close(found, (stats.logprob, stats.entropy))


@pytest.mark.parametrize(
    ("module", "name", "first"),
    [
        (
            "trl.trainer.utils",
            "_ChunkedLogProbFunction.forward",
            "ctx hidden weight bias targets temperature chunk_size",
        ),
        ("trl.trainer.utils", "selective_log_softmax", "logits index temperature row_mask"),
        ("trl.trainer.utils", "selective_log_softmax_and_entropy", "logits index"),
        ("trl.trainer.utils", "entropy_from_logits", "logits chunk_size"),
        ("trl.trainer.utils", "add_fused_lm_head", "model"),
        ("trl.trainer.utils", "FusedCausalLMOutput", "loss"),
        ("trl.experimental.gkd", "GKDTrainer.generalized_jsd_loss", "student_logits"),
        ("trl.experimental.gold", "GOLDTrainer.generalized_jsd_loss", "student_logits"),
        *(("trl", f"{name}Trainer", "") for name in ("SFT", "DPO", "KTO", "RLOO", "Distillation")),
        ("trl", "GRPOTrainer._generate", "self prompts"),
        ("trl", "GRPOTrainer._generate_and_score_completions", "self inputs"),
        ("trl", "GRPOTrainer._compute_loss", "self model inputs"),
        (
            "trl",
            "GRPOTrainer._get_per_token_logps_and_entropies",
            "self model input_ids attention_mask logits_to_keep batch_size compute_entropy",
        ),
        (
            "verl.utils.experimental.torch_functional",
            "FusedLinearForPPO.forward",
            "self hidden_states vocab_weights input_ids temperature",
        ),
    ],
)
def test_signatures_of_the_packages(module: str, name: str, first: str) -> None:
    pytest.importorskip(module.partition(".")[0], exc_type=ImportError)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    names = list(inspect.signature(found).parameters)
    assert names[: len(first.split())] == first.split()
