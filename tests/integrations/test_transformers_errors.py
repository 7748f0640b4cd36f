"""Arguments that the losses of causal language models refuse."""

import pytest
import torch

from partita.integrations.transformers import causal_lm_loss, linear_causal_lm_loss

LOGITS, LABELS = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
BAD = torch.tensor([[9, 1, 2], [3, 0, 7]])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": [1.0]}, TypeError, "logits: expected a Tensor, got list"),
        ({"logits": LOGITS.long()}, TypeError, "logits: expected a floating dtype"),
        (
            {"vocab_size": 5},
            ValueError,
            r"logits: expected shape \[..., T, vocab_size\] with vocab_size = 5, got \[2, 3, 4\]",
        ),
        ({"vocab_size": None}, ValueError, "vocab_size: expected an int of at least 1, got None"),
        ({"labels": None}, TypeError, "labels: expected a Tensor, got NoneType"),
        (
            {"labels": LABELS.float()},
            TypeError,
            "labels: expected an integer dtype, got torch.float32",
        ),
        (
            {"labels": LABELS[:, 1:]},
            ValueError,
            r"labels: expected 6 labels, one for each position, got 4, of shape \[2, 2\]",
        ),
        ({"labels": LABELS[0, 0]}, ValueError, r"labels: expected shape \[..., T\], got \[\]"),
        (
            {"labels": BAD},
            IndexError,
            r"^labels: expected labels from 0 to 3 \(or ignore_index -100\), got 7 at \[1, 2\]",
        ),
        (
            {"shift_labels": LABELS[:1]},
            ValueError,
            r"shift_labels: expected 6 labels, one for each position, got 3",
        ),
        (
            {"shift_labels": LABELS.bool()},
            TypeError,
            "shift_labels: expected an integer dtype, got torch.bool",
        ),
        (
            {"num_items_in_batch": "6"},
            TypeError,
            "num_items_in_batch: expected a number, a Tensor or None, got str",
        ),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing: expected a number"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a number above 0.0, got 0.0"),
    ],
)
def test_what_is_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        causal_lm_loss(**{"logits": LOGITS, "labels": LABELS, "vocab_size": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_states": LABELS}, TypeError, "hidden_states: expected a floating dtype"),
        (
            {"hidden_states": torch.zeros(2, 3, 6)},
            ValueError,
            r"hidden_states: expected shape \[..., T, H\] with H = 5, got \[2, 3, 6\]",
        ),
        (
            {"lm_head_weight": torch.zeros(5)},
            ValueError,
            r"lm_head_weight: expected shape \[vocab_size, H\], got \[5\]",
        ),
        ({"lm_head_weight": None}, TypeError, "lm_head_weight: expected a Tensor, got NoneType"),
        (
            {"softcap": 3.0, "final_logit_softcapping": 4.0},
            ValueError,
            "softcap: expected one number, got 3.0 and final_logit_softcapping 4.0",
        ),
        (
            {"lm_head_weight": torch.zeros(4, 5, dtype=torch.bfloat16)},
            TypeError,
            "lm_head_weight: expected the dtype of hidden_states, torch.float32",
        ),
        (
            {"lm_head_weight": torch.zeros(4, 5, device="meta")},
            ValueError,
            "lm_head_weight: expected the device of hidden_states, cpu, got meta",
        ),
        (
            {"labels": LABELS[:1]},
            ValueError,
            "labels: expected 6 labels, one for each position, got 3",
        ),
        ({"labels": BAD}, IndexError, r"^labels: expected labels from 0 to 3.*got 7 at \[1, 2\]"),
        ({"shift_labels": BAD}, IndexError, r"^shift_labels: .*got 9 at \[0, 0\]"),
        ({"linear_bias": torch.zeros(3)}, ValueError, "linear_bias: expected shape"),
        (
            {"num_items_in_batch": True},
            TypeError,
            "num_items_in_batch: expected a number, a Tensor or None, got bool",
        ),
    ],
)
def test_what_is_refused_without_logits(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        linear_causal_lm_loss(
            **{
                "hidden_states": torch.zeros(2, 3, 5),
                "lm_head_weight": torch.zeros(4, 5),
                "labels": LABELS,
                **changes,
            }
        )
