"""Arguments that the losses of causal language models refuse."""

import pytest
import torch
from helpers.errors import raises

from partita.integrations.transformers import causal_lm_loss, linear_causal_lm_loss

LOGITS, LABELS = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
BAD = torch.tensor([[9, 1, 2], [3, 0, 7]])


@pytest.mark.parametrize(
    ("error", "changes"),
    {
        "TypeError: logits: expected a Tensor, got list": {"logits": [1.0]},
        "TypeError: logits: expected a floating dtype": {"logits": LOGITS.long()},
        r"ValueError: logits: expected shape \[..., T, vocab_size\] with vocab_size = 5, got"
        r" \[2, 3, 4\]": {"vocab_size": 5},
        "ValueError: vocab_size: expected an int of at least 1, got None": {"vocab_size": None},
        "TypeError: labels: expected a Tensor, got NoneType": {"labels": None},
        "TypeError: labels: expected an integer dtype, got torch.float32": {
            "labels": LABELS.float()
        },
        r"ValueError: labels: expected 6 labels, one for each position, got 4, of shape \[2, 2\]": {
            "labels": LABELS[:, 1:]
        },
        r"ValueError: labels: expected shape \[..., T\], got \[\]": {"labels": LABELS[0, 0]},
        r"IndexError: labels: expected labels from 0 to 3 \(or ignore_index -100\), got 7 at"
        r" \[1, 2\]": {"labels": BAD},
        r"ValueError: shift_labels: expected 6 labels, one for each position, got 3": {
            "shift_labels": LABELS[:1]
        },
        "TypeError: shift_labels: expected an integer dtype, got torch.bool": {
            "shift_labels": LABELS.bool()
        },
        "TypeError: num_items_in_batch: expected a number, a Tensor or None, got str": {
            "num_items_in_batch": "6"
        },
        "ValueError: label_smoothing: expected a number": {"label_smoothing": 2.0},
        "ValueError: softcap: expected a number above 0.0, got 0.0": {"softcap": 0.0},
    }.items(),
)
def test_what_is_refused(error: str, changes: dict[str, object]) -> None:
    with raises(error):
        causal_lm_loss(**{"logits": LOGITS, "labels": LABELS, "vocab_size": 4, **changes})


@pytest.mark.parametrize(
    ("error", "changes"),
    {
        "TypeError: hidden_states: expected a floating dtype": {"hidden_states": LABELS},
        r"ValueError: hidden_states: expected shape \[..., T, H\] with H = 5, got \[2, 3, 6\]": {
            "hidden_states": torch.zeros(2, 3, 6)
        },
        r"ValueError: lm_head_weight: expected shape \[vocab_size, H\], got \[5\]": {
            "lm_head_weight": torch.zeros(5)
        },
        "TypeError: lm_head_weight: expected a Tensor, got NoneType": {"lm_head_weight": None},
        "ValueError: softcap: expected one number, got 3.0 and final_logit_softcapping 4.0": {
            "softcap": 3.0,
            "final_logit_softcapping": 4.0,
        },
        "TypeError: lm_head_weight: expected the dtype of hidden_states, torch.float32": {
            "lm_head_weight": torch.zeros(4, 5, dtype=torch.bfloat16)
        },
        "ValueError: lm_head_weight: expected the device of hidden_states, cpu, got meta": {
            "lm_head_weight": torch.zeros(4, 5, device="meta")
        },
        "ValueError: labels: expected 6 labels, one for each position, got 3": {
            "labels": LABELS[:1]
        },
        r"IndexError: labels: expected labels from 0 to 3.*got 7 at \[1, 2\]": {"labels": BAD},
        r"IndexError: shift_labels: .*got 9 at \[0, 0\]": {"shift_labels": BAD},
        "ValueError: linear_bias: expected shape": {"linear_bias": torch.zeros(3)},
        "TypeError: num_items_in_batch: expected a number, a Tensor or None, got bool": {
            "num_items_in_batch": True
        },
    }.items(),
)
def test_what_is_refused_without_logits(error: str, changes: dict[str, object]) -> None:
    with raises(error):
        linear_causal_lm_loss(
            **{
                "hidden_states": torch.zeros(2, 3, 5),
                "lm_head_weight": torch.zeros(4, 5),
                "labels": LABELS,
                **changes,
            }
        )
