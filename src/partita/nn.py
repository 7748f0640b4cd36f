"""Modules with the constructors of torch.nn and of pytorch-crf."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops.cross_entropy.api import cross_entropy
from .ops.cross_entropy.common import checked_options
from .ops.ctc.api import ctc_loss
from .ops.linear_chain.api import LinearChain, linear_chain
from .ops.linear_heads.api import linear_cross_entropy
from .ops.linear_heads.low_rank import LowRank
from .ops.rnnt.module import RNNTLoss as RNNTLoss
from .runtime import checks
from .runtime.lengths import Lengths

RNNTLoss.__module__ = __name__  # users and pickles meet it here


def _loss_repr(module: CrossEntropyLoss | LinearCrossEntropyLoss) -> str:
    """Return the options that the modules of cross-entropy print."""
    return (
        f"ignore_index={module.ignore_index}, reduction={module.reduction!r},"
        f" label_smoothing={module.label_smoothing}, softcap={module.softcap},"
        f" z_loss={module.z_loss}"
    )


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`partita.cross_entropy` as a module.

    It is `torch.nn.CrossEntropyLoss` with soft-capping and z-loss.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as in
            `torch.nn.CrossEntropyLoss`.
        softcap, z_loss, inplace: as in `partita.cross_entropy`.

    Raises:
        TypeError, ValueError: an option that no call would accept.

    Source: `torch.nn.CrossEntropyLoss`; the method is the one of `partita.cross_entropy`.

    Example:
        >>> import torch, partita
        >>> partita.nn.CrossEntropyLoss(z_loss=1e-4)(torch.zeros(2, 3), torch.tensor([0, 2]))
        tensor(1.0987)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float | None = None,
        z_loss: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        checked_options(ignore_index, label_smoothing, softcap, z_loss, self.reduction)
        self.softcap, self.z_loss, self.inplace = softcap, z_loss, inplace

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute `partita.cross_entropy`, in nats, with the options of the module.

        Args:
            input: logits `[N, C, ...]` or `[C]`.
            target: labels `[N, ...]` or `[]`, or probabilities with the shape of `input`.

        Returns:
            A number, or `[N, ...]` with `reduction="none"`.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as in `partita.cross_entropy`.
        """
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        """Return the options that torch prints with the module."""
        return f"{_loss_repr(self)}, inplace={self.inplace}"


class LinearCrossEntropyLoss(torch.nn.Module):
    """`partita.linear_cross_entropy` as a module that owns the matrix.

    It is `torch.nn.LinearCrossEntropyLoss` with the options of Partita.

    Args:
        in_features, num_classes, out_features, bias, device, dtype: describe the linear layer
            `linear`, whose matrix is `[C * prod(out_features), H]`.
        reduction, weight, ignore_index, label_smoothing: as in
            `torch.nn.LinearCrossEntropyLoss`.
        softcap, z_loss, memory_budget, logits_dtype: as in `partita.linear_cross_entropy`; the
            budget is in bytes.

    Raises:
        TypeError, ValueError: an option that no call would accept.

    Source: `torch.nn.LinearCrossEntropyLoss`; the method is the one of
    `partita.linear_cross_entropy`.

    Example:
        >>> import torch, partita
        >>> loss = partita.nn.LinearCrossEntropyLoss(4, 10)
        >>> loss(torch.zeros(2, 4), torch.tensor([0, 2]))
        tensor(2.3026, grad_fn=<...>)
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        memory_budget: int | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ignored = -100 if ignore_index is None else ignore_index
        checked_options(ignored, label_smoothing, softcap, z_loss, reduction)
        self.num_classes = num_classes
        self.out_features = tuple(out_features)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss
        self.memory_budget = memory_budget
        self.logits_dtype = logits_dtype
        self.linear = torch.nn.Linear(
            in_features,
            math.prod(out_features, start=num_classes),
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.register_buffer("weight", weight)

    def forward(self, input: Tensor, target: Tensor, low_rank: LowRank | None = None) -> Tensor:
        """Compute `partita.linear_cross_entropy`, in nats, with the options of the module.

        Args:
            input: hidden states `[..., H]`, H = in_features.
            target: labels `[...]` (`[N, *out_features]`), or probabilities `[..., C]`
                (`[N, C, *out_features]`).
            low_rank: as in `partita.linear_cross_entropy`.

        Returns:
            A number, or the shape of the labels, `[...]`, with `reduction="none"`.

        Raises:
            TypeError, ValueError, IndexError: as in `partita.linear_cross_entropy`.
        """
        shape, bias = (self.num_classes, *self.out_features), self.linear.bias
        return linear_cross_entropy(
            input,
            self.linear.weight.reshape(*shape, self.linear.in_features),
            target,
            linear_bias=None if bias is None else bias.reshape(shape),
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            memory_budget=self.memory_budget,
            logits_dtype=self.logits_dtype,
            low_rank=low_rank,
        )

    def extra_repr(self) -> str:
        """Return the options that torch prints with the module."""
        return f"{_loss_repr(self)}, memory_budget={self.memory_budget}"


class CTCLoss(torch.nn.CTCLoss):
    """`partita.ctc_loss` as a module.

    It is `torch.nn.CTCLoss`, which can also compute the log-softmax.

    Args:
        blank, reduction, zero_infinity: as in `torch.nn.CTCLoss`.
        from_logits: as in `partita.ctc_loss`.

    Raises:
        TypeError, ValueError: an option that no call would accept.

    Source: `torch.nn.CTCLoss`; the method is the one of `partita.ctc_loss`.

    Example:
        >>> import torch, partita
        >>> loss = partita.nn.CTCLoss(from_logits=True)
        >>> loss(torch.zeros(2, 1, 2), torch.tensor([[1]]), [2], [1])
        tensor(0.2877)
    """

    def __init__(
        self,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
        *,
        from_logits: bool = False,
    ) -> None:
        checks.choice("reduction", reduction, checks.REDUCTIONS)
        checks.python_int("blank", blank)
        if blank < 0:
            raise ValueError(f"blank: expected a class, 0 or more, got {blank}")
        super().__init__(blank, reduction, zero_infinity)
        self.from_logits = from_logits

    def forward(
        self, log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths
    ) -> Tensor:
        """Compute `partita.ctc_loss`, in nats, with the options of the module.

        Args:
            log_probs, targets, input_lengths, target_lengths: as in `partita.ctc_loss`.

        Returns:
            A number, or `[N]` with `reduction="none"`.

        Raises:
            TypeError, ValueError, IndexError: as in `partita.ctc_loss`.
        """
        return ctc_loss(
            log_probs,
            targets,
            input_lengths,
            target_lengths,
            self.blank,
            self.reduction,
            self.zero_infinity,
            from_logits=self.from_logits,
        )

    def extra_repr(self) -> str:
        """Return the options that torch prints with the module."""
        return (
            f"blank={self.blank}, reduction={self.reduction!r},"
            f" zero_infinity={self.zero_infinity}, from_logits={self.from_logits}"
        )


class CRF(torch.nn.Module):
    """A linear-chain conditional random field with the interface of `torchcrf.CRF`.

    Args:
        num_tags: the number of tags, C.
        batch_first: whether emissions, tags and masks are `[N, T, ...]` instead of `[T, N, ...]`.

    The parameters are `start_transitions` and `end_transitions`, `[C]`, and `transitions`,
    `[C, C]`, from and to, in nats. State dictionaries of `torchcrf.CRF` load.

    Raises:
        TypeError, ValueError: `num_tags` is not a positive integer.

    Source: the class of pytorch-crf 0.7.2; Lafferty et al., Conditional random fields, 2001. The
    method is the one of `partita.linear_chain`.

    Example:
        >>> import torch, partita
        >>> crf = partita.nn.CRF(3)
        >>> emissions = torch.tensor([[[9.0, 0.0, 0.0]], [[0.0, 9.0, 0.0]]])
        >>> crf.decode(emissions)
        [[0, 1]]
        >>> loss = -crf(emissions, torch.tensor([[0], [1]]), reduction="token_mean")
    """

    def __init__(self, num_tags: int, batch_first: bool = False) -> None:
        checks.python_int("num_tags", num_tags)
        if num_tags <= 0:
            raise ValueError(f"num_tags: expected a number of tags, 1 or more, got {num_tags}")
        super().__init__()
        self.num_tags, self.batch_first = num_tags, batch_first
        self.start_transitions = torch.nn.Parameter(torch.empty(num_tags))
        self.end_transitions = torch.nn.Parameter(torch.empty(num_tags))
        self.transitions = torch.nn.Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly between -0.1 and 0.1.

        Example:
            >>> import torch, partita
            >>> crf = partita.nn.CRF(3)
            >>> crf.reset_parameters()
            >>> bool(crf.transitions.abs().max() <= 0.1)
            True
        """
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.1, 0.1)

    def chain(self, emissions: Tensor, mask: Tensor | None = None) -> LinearChain:
        """Return the `LinearChain` of a batch, which has posteriors, samples and entropies.

        Args:
            emissions: `[T, N, C]`, or `[N, T, C]` with `batch_first`.
            mask: `[T, N]`, or `[N, T]` with `batch_first`, bool or uint8: the tokens of each
                sequence, which are a prefix of it; all if None.

        Returns:
            The chain, whose first dimension is T in any case.

        Raises:
            TypeError, ValueError: as in `partita.LinearChain`.

        Example:
            >>> import torch, partita
            >>> crf = partita.nn.CRF(3, batch_first=True)
            >>> crf.chain(torch.zeros(2, 7, 3)).state_marginals().shape
            torch.Size([7, 2, 3])
        """
        if emissions.ndim == 3 and emissions.shape[2] != self.num_tags:
            raise ValueError(
                f"emissions: expected {self.num_tags} tags in the last dimension,"
                f" got {emissions.shape[2]}"
            )
        if mask is not None and mask.dtype == torch.uint8:
            mask = mask.bool()
        ends = self.start_transitions, self.end_transitions
        return linear_chain(
            emissions, self.transitions, *ends, mask=mask, batch_first=self.batch_first
        )

    def forward(
        self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None, reduction: str = "sum"
    ) -> Tensor:
        """Compute the log-likelihood of tags in nats; the loss is its negative.

        Args:
            emissions, mask: as in `chain`.
            tags: `[T, N]`, or `[N, T]` with `batch_first`; those past a length are ignored.
            reduction: `none`, `sum`, `mean` over the sequences, or `token_mean` over the tokens.

        Returns:
            A number, or `[N]` with `reduction="none"`.

        Raises:
            TypeError, ValueError: as in `partita.LinearChain`.
            IndexError: a tag is out of range. On a GPU this is checked only with
                `PARTITA_CHECK=1`, and otherwise gives -inf.
        """
        checks.choice("reduction", reduction, ("none", "sum", "mean", "token_mean"))
        chain = self.chain(emissions, mask)
        checks.integer("tags", tags)
        checks.shape("tags", tags, emissions.shape[:2], "that of the emissions")
        if checks.can_check_values(tags):
            counted = tags if mask is None else tags.masked_fill(mask == 0, 0)
            checks.labels("tags", counted, self.num_tags, checks.NOTHING_IGNORED)
        log_likelihood = chain.log_prob(tags.mT if self.batch_first else tags)
        if reduction == "none":
            return log_likelihood
        if reduction == "mean":
            return log_likelihood.mean()
        total = log_likelihood.sum()
        if reduction == "sum":
            return total
        return total / (tags.numel() if chain.lengths is None else chain.lengths.sum())

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """Return the best tags of each sequence as lists, for which the host waits for the device.

        `chain(emissions, mask).viterbi().states` stays on the device.

        Args:
            emissions, mask: as in `chain`.

        Raises:
            TypeError, ValueError: as in `partita.LinearChain`.
        """
        states = self.chain(emissions, mask).viterbi().states.T.tolist()
        return [[state for state in row if state >= 0] for row in states]

    def extra_repr(self) -> str:
        """Return the options that torch prints with the module."""
        return f"num_tags={self.num_tags}, batch_first={self.batch_first}"
