"""A causal language model that has what `fuse` needs of a model of transformers, without it."""

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

CLASSES, HIDDEN = 37, 8


def ForCausalLMLoss(  # the name in transformers
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kw: Any,
) -> Tensor:
    """Compute the loss from fp32 logits, as its documentation says."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    total = F.cross_entropy(
        logits.float().view(-1, vocab_size),
        shift_labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return total if num_items_in_batch is None else total / num_items_in_batch


class Output(OrderedDict):
    """An output whose entries are attributes; those that are None are missing."""

    def __init__(self, **entries: Any) -> None:
        super().__init__((name, value) for name, value in entries.items() if value is not None)

    def __getattr__(self, name: str) -> Any:
        if name in ("loss", "logits"):
            return self.get(name)
        raise AttributeError(name)


# FSDP2 finds the loss in an output only if its class is registered, as those of transformers are.
pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
)


class Config:
    """The configuration of a model."""

    def __init__(self, softcap: float | None = None) -> None:
        self.final_logit_softcapping = softcap
        self.vocab_size = CLASSES


class CausalLM(nn.Module):
    """An embedding, a layer and a head."""

    def __init__(
        self, softcap: float | None = None, tied: bool = False, bias: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = Config(softcap)
        self.embedding = nn.Embedding(CLASSES, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, CLASSES, bias=bias)
        if tied:
            self.lm_head.weight = self.embedding.weight

    @property
    def loss_function(self) -> Any:
        return getattr(self, "_loss_function", ForCausalLMLoss)

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        logits = self.lm_head(torch.tanh(self.layer(self.embedding(input_ids))))
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return Output(loss=loss, logits=logits) if return_dict else (loss, logits)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens `[3, 7]`, and their labels, some of which are ignored."""
    input_ids = torch.randint(CLASSES, (3, 7), generator=torch.Generator().manual_seed(seed))
    labels = input_ids.clone()
    labels[:, 2:4] = -100
    return input_ids, labels


INPUT_IDS, LABELS = tokens()


def step(model: nn.Module, **arguments: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the output of a forward pass of the tokens, and the gradients of its loss by name.

    A model that is compiled has the names of its own, and dropout is the same in each step.
    """
    model.zero_grad()
    torch.manual_seed(1)
    output = model(input_ids=INPUT_IDS, **{"labels": LABELS, **arguments})
    output.loss.backward()
    return output, {
        name.removeprefix("_orig_mod."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
