"""The row statistics and losses of TRL's trainers by their names, and a patch of its trainers."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.cross_entropy.api import TokenStats, token_stats
from ..ops.divergence.api import divergence
from ..ops.linear_heads.api import linear_token_stats
from ..ops.linear_heads.divergence import linear_divergence
from ..ops.linear_heads.plan import check_budget
from ..ops.logprobs.autograd import logprobs_of
from ..ops.logprobs.common import check_ids
from ..runtime import checks
from .adapters import LORA, check_head, head_parts, name_of
from .naming import Renamed

__all__ = [
    "entropy_from_logits",
    "generalized_jsd_loss",
    "patch",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
    "unpatch",
]

IGNORED = -100  # the label of positions without a loss
SMALLEST_PROBABILITY = 1e-8  # to which TRL raises smaller probabilities
NO_LABEL = -1  # no class, and so what a masked row may have as its ignored label


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the given classes of each row, `log_softmax` and then `gather`.

    Args:
        logits: `[..., C]`, floating dtype.
        index: classes `[...]`, or `[..., K]`, any integer dtype.
        temperature: positive; what the logits are divided by.
        row_mask: `[...]` or `[..., K]`, the shape of the classes; where it is 0, results and
            gradients are 0, and the class may be any number.

    Returns:
        Log-probabilities in nats, `[...]` or `[..., K]`, differentiable in the logits. Half types
        give fp32 on a GPU and their own dtype on a CPU, as in TRL.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.token_stats` and `partita.logprobs`.

    Source: `trl.trainer.utils.selective_log_softmax` of TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import selective_log_softmax
        >>> selective_log_softmax(torch.zeros(1, 2, 4), torch.tensor([[3, 0]]))
        tensor([[-1.3863, -1.3863]])
    """
    checks.floating("logits", logits)
    checks.integer("index", index)
    if index.ndim == logits.ndim - 1:
        return _in_dtype(_statistics(logits, index, temperature, row_mask).logprob, logits)
    numbers = checks.temperature_and_softcap(temperature, None)
    with Renamed({"ids": "index"}):
        check_ids(index, logits, "logits")
        ids, ignored = _with_ignored(index, row_mask)
        return _in_dtype(logprobs_of(logits, ids, *numbers, ignored), logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of one class, and entropy, of each row, from one read of the logits.

    Args:
        logits: `[..., C]`, floating dtype.
        index: classes `[...]`, any integer dtype.
        entropy_requires_grad: whether the entropy is differentiable.
        temperature, row_mask: as in `selective_log_softmax`.

    Returns:
        Log-probabilities and entropies in nats, both `[...]`, in the dtype of
        `selective_log_softmax`.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.token_stats`.

    Source: the function of that name in TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import selective_log_softmax_and_entropy
        >>> selective_log_softmax_and_entropy(torch.zeros(1, 4), torch.tensor([2]))
        (tensor([-1.3863]), tensor([1.3863]))
    """
    checks.floating("logits", logits)
    checks.integer("index", index)
    stats = _statistics(logits, index, temperature, row_mask)
    entropy = stats.entropy if entropy_requires_grad else stats.entropy.detach()
    if row_mask is not None:
        entropy = entropy.masked_fill(_masked(index, row_mask), 0.0)
    return _in_dtype(stats.logprob, logits), _in_dtype(entropy, logits)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Entropy of each row of logits, in nats.

    Args:
        logits: `[..., C]`, floating dtype.
        chunk_size: taken for TRL's signature, and not used: no chunk of probabilities is made.

    Returns:
        Entropies `[...]`, differentiable in the logits, in the dtype of `selective_log_softmax`.

    Raises:
        TypeError, ValueError: as in `partita.token_stats`.

    Source: `trl.trainer.utils.entropy_from_logits` of TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import entropy_from_logits
        >>> entropy_from_logits(torch.zeros(1, 2, 4))
        tensor([[1.3863, 1.3863]])
    """
    return _in_dtype(token_stats(logits).entropy, logits)


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    logits_are_probs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student from a teacher, for distillation.

    Args:
        student_logits, teacher_logits: `[N, ..., C]`, floating dtype.
        labels: `[N, ...]`, any integer dtype; positions with -100 have loss and gradient 0.
        beta, temperature: as in `partita.divergence`.
        reduction: `batchmean` (over the positions with a label; over N without labels), `mean`
            (over these positions and the C classes) or `sum`.
        logits_are_probs: whether both are probabilities, from which no temperature is taken.
        num_items_in_batch: what the sum is divided by instead, a number.

    Returns:
        The divergence in nats, a number, fp32 (fp64 for fp64), differentiable in `student_logits`.
        Without any label it is 0, and its `mean` NaN.

    Raises:
        TypeError, ValueError: as in `partita.divergence`.

    Source: `GKDTrainer.generalized_jsd_loss` and that of `GOLDTrainer` in TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import generalized_jsd_loss
        >>> teacher = torch.tensor([[[1.0986, 0.0]]])
        >>> generalized_jsd_loss(torch.zeros(1, 1, 2), teacher, torch.tensor([[1]]), beta=0.0)
        tensor(0.1308)
    """
    checks.choice("reduction", reduction, ("batchmean", "mean", "sum"))
    checks.floating("student_logits", student_logits)
    checks.floating("teacher_logits", teacher_logits)
    mask = None
    if labels is not None:
        checks.integer("labels", labels)
        mask = labels != IGNORED
    if logits_are_probs:
        student_logits, teacher_logits = (
            p.clamp_min(SMALLEST_PROBABILITY).log() for p in (student_logits, teacher_logits)
        )
        temperature = 1.0
    is_mean = num_items_in_batch is None and (
        reduction == "mean" or (reduction == "batchmean" and mask is not None)
    )
    with Renamed({"logits": "student_logits", "mask": "labels"}):
        loss = divergence(
            student_logits,
            teacher_logits,
            beta=beta,
            temperature=temperature,
            mask=mask,
            reduction="mean" if is_mean else "sum",
        )
    if num_items_in_batch is not None:
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch
    if reduction == "mean":
        return loss / student_logits.shape[-1]
    if reduction == "sum":
        return loss
    if mask is None:
        return loss / max(student_logits.shape[0], 1)
    return loss.masked_fill(~mask.any(), 0.0)


def patch(*, memory_budget: int | None = 2**30) -> None:
    """Put Partita's statistics of linear heads into the trainers of TRL, until `unpatch`.

    `add_fused_lm_head` gives a model a fused head, in SFT, DPO, KTO, GRPO and RLOO. Its
    log-probabilities, and the entropy, log Σ p², mean logits and hits beside them, then come from
    `partita.linear_token_stats`, also in models that have got their head before. The loss of
    `DistillationTrainer` comes from `partita.linear_divergence`. Everything else is TRL's, but that
    the five trainers serve LoRA on the head, which TRL refuses. A second call changes the budget
    alone.

    Args:
        memory_budget: bytes of workspace, as in `partita.linear_token_stats`. With the default a
            training step takes about as much memory as with TRL's own head.

    Raises:
        ImportError: this version of TRL has no such functions.

    Source: `trl.kernels.ChunkedLogProbFunction` and `ChunkedDivergenceFunction` of TRL 1.16, 2026.

    Example:
        >>> from partita.integrations.trl import patch, unpatch
        >>> patch()  # before trainer.train()
        >>> unpatch()
    """
    check_budget(memory_budget)
    for replaced in REPLACED:
        module = importlib.import_module(replaced.module)
        if not hasattr(module, replaced.name):
            version = getattr(sys.modules["trl"], "__version__", "unknown")
            raise ImportError(
                f"trl: expected TRL 1.16, with {replaced.module}.{replaced.name}, got {version}"
            )
    for replaced in REPLACED:
        found = getattr(sys.modules[replaced.module], replaced.name)
        if found is not replaced.ours:
            _own[replaced.name] = found
            _replace_everywhere(found, replaced.ours)
    for module in map(importlib.import_module, TRAINERS):
        if getattr(module, TUNER, None):  # the class of adapters that a trainer refuses
            _own[TUNER] = getattr(module, TUNER)
            setattr(module, TUNER, ())
    _options["memory_budget"] = memory_budget


def unpatch() -> None:
    """Undo `patch`; without it, do nothing.

    Source: the counterpart of `patch`.

    Example:
        >>> from partita.integrations.trl import unpatch
        >>> unpatch()
    """
    for replaced in REPLACED:
        if replaced.name in _own:
            _replace_everywhere(replaced.ours, _own.pop(replaced.name))
    if TUNER in _own:
        tuner = _own.pop(TUNER)
        for name in TRAINERS:
            setattr(sys.modules[name], TUNER, tuner)


def _replace_everywhere(old: Any, new: Any) -> None:
    """Set the names that lead to one object, in all modules of TRL, to another."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trl":
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


_own: dict[str, Any] = {}  # what `patch` has replaced, by the names of TRL
_options: dict[str, Any] = {"memory_budget": None}  # those of `patch`


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Give a model TRL's fused head, whose `TokenStatistics` know the model."""
    head = model.get_output_embeddings()
    if hasattr(head, "base_layer"):
        check_head(head)
    outputs = OutputsOf(model, outputs)
    _own["add_fused_lm_head"](model, temperature, cast_lm_head_to_fp32, outputs)


class OutputsOf(tuple[str, ...]):
    """The outputs of a fused head, which TRL hands on as they are, and its model."""

    model: Any

    def __new__(cls, model: Any, outputs: tuple[str, ...]) -> OutputsOf:
        self = super().__new__(cls, outputs)
        self.model = model
        return self


class TokenStatistics:
    """`ChunkedLogProbFunction` of TRL, which calls its `apply` alone."""

    @staticmethod
    def apply(
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [C, H]
        bias: Tensor | None,  # [C]
        targets: Tensor,  # [N]
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Tensor | None, ...]:
        """Return log-probabilities, entropies, log Σ p², mean logits and hits, each `[N]` or None.

        The first two are differentiable. None stands for what is not among the outputs.
        """
        if _is_partitioned(weight):
            arguments = (temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
            own = _own["_ChunkedLogProbFunction"]
            return own.apply(hidden, weight, bias, targets, *arguments)
        head = _in_one_dtype(hidden, weight, bias)
        if isinstance(outputs, OutputsOf):
            head = head.with_adapters(outputs.model.get_output_embeddings())
        numbers = _numbers(temperature, logit_scale, final_logit_softcapping)
        # TRL leaves tokens out by a mask, so no label is ignored.
        stats = head.stats(targets, numbers, **_options, ignore_index=checks.NOTHING_IGNORED)
        entropy = stats.entropy if "entropy" in outputs else None
        log_sum_sq_probs = mean_logits = is_top1 = None
        with torch.no_grad():
            if "log_sum_sq_probs" in outputs:
                # log Σ p² is log Σ exp(2 z) - 2 log Z, a log Z at half the temperature.
                halved = numbers._replace(temperature=numbers.temperature / 2)
                squared = head.stats(None, halved, **_options)
                log_sum_sq_probs = squared.logsumexp - 2 * stats.logsumexp
            if "mean_logits" in outputs:
                mean_logits = head.mean_logits(numbers)
            if "is_top1" in outputs:
                is_top1 = stats.argmax == targets
        return stats.logprob, entropy, log_sum_sq_probs, mean_logits, is_top1


class Divergences:
    """`ChunkedDivergenceFunction` of TRL, which calls its `apply` alone."""

    @staticmethod
    def apply(
        student_hidden: Tensor,  # [N, H]
        student_weight: Tensor,  # [C, H]
        student_bias: Tensor | None,  # [C]
        teacher_hidden: Tensor,  # [N, K]
        teacher_weight: Tensor,  # [C, K]
        teacher_bias: Tensor | None,  # [C]
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the divergences, and the student's entropies without a gradient, both `[N]`."""
        student = _Head(student_hidden, student_weight, student_bias)
        teacher = _Head(teacher_hidden, teacher_weight, teacher_bias)
        caps = student_final_logit_softcapping, teacher_final_logit_softcapping
        scales = student_logit_scale, teacher_logit_scale
        if caps[0] != caps[1]:
            _warn_of_own("student and teacher have different soft caps")
        if caps[0] != caps[1] or _is_partitioned(student_weight) or _is_partitioned(teacher_weight):
            arguments = (beta, temperature, scales[0], caps[0], scales[1], caps[1])
            return _own["ChunkedDivergenceFunction"].apply(*student[:3], *teacher[:3], *arguments)
        student, teacher = _in_one_dtype(*student[:3]), _in_one_dtype(*teacher[:3])
        if scales[0] != scales[1]:  # Their numbers are the same.
            student, teacher = student.scaled(scales[0]), teacher.scaled(scales[1])
            scales = 1.0, 1.0
        numbers = _numbers(temperature, scales[0], caps[0])
        dtype = torch.float32 if student_hidden.dtype != torch.float64 else None
        options = _options | {"logits_dtype": dtype}
        divergences = linear_divergence(
            student.hidden,
            student.weight,
            teacher.hidden,
            teacher.weight,
            linear_bias=student.bias,
            teacher_bias=teacher.bias,
            beta=beta,
            **numbers._asdict(),
            reduction="none",
            **options,
        )
        with torch.no_grad():
            entropies = student.stats(None, numbers, **options).entropy
        return divergences, entropies


class Replaced(NamedTuple):
    """What `patch` replaces."""

    module: str  # of TRL, which looks the name up at each call
    name: str
    ours: Any


REPLACED = (
    Replaced("trl.trainer.utils", "add_fused_lm_head", add_fused_lm_head),
    Replaced("trl.trainer.utils", "_ChunkedLogProbFunction", TokenStatistics),
    Replaced("trl.trainer.distillation_trainer", "ChunkedDivergenceFunction", Divergences),
)


# The trainers that refuse a head with adapters, that is, an instance of this class.
TRAINERS = [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "grpo", "rloo")]
TUNER = "BaseTunerLayer"


class _Numbers(NamedTuple):
    temperature: float
    softcap: float | None


def _numbers(temperature: float, scale: float, softcap: float | None) -> _Numbers:
    """Return a temperature and a soft cap of the logits before the factor of a model.

    The cap c comes after the factor s, and s is divided out of both: c tanh(s y / c) / T is
    (c / s) tanh(y / (c / s)) / (T / s).
    """
    checks.number("logit_scale", scale, low=0.0, open_low=True)
    return _Numbers(temperature / scale, None if softcap is None else softcap / scale)


class _Head(NamedTuple):
    hidden: Tensor  # [N, H]
    weight: Tensor  # [C, H]
    bias: Tensor | None  # [C]
    low_rank: tuple[Tensor, Tensor] | None = None  # [N, r] and [C, r]

    def with_adapters(self, layer: Any) -> _Head:
        """Add the LoRA that PEFT has around the layer, as it is now."""
        if name_of(layer) != LORA:
            return self
        check_head(layer)
        parts = head_parts(layer, self.hidden)
        return self._replace(bias=parts.bias, low_rank=parts.low_rank)

    def scaled(self, scale: float) -> _Head:
        bias = None if self.bias is None else self.bias * scale
        return _Head(self.hidden * scale, self.weight, bias)

    def stats(self, targets: Tensor | None, numbers: _Numbers, **options: Any) -> TokenStats:
        options |= numbers._asdict() | {"low_rank": self.low_rank}
        return linear_token_stats(
            self.hidden, self.weight, targets, linear_bias=self.bias, **options
        )

    def mean_logits(self, numbers: _Numbers) -> Tensor:
        """Return the mean over the classes of the logits over the temperature, `[N]`."""
        states, factors = self.low_rank or (self.hidden[:, :0], self.weight[:, :0])
        if numbers.softcap is None:  # A mean of products is a product with the mean.
            with torch.autocast(self.hidden.device.type, enabled=False):
                found = self.hidden.float() @ self.weight.mean(0, dtype=torch.float32)
                found += states.float() @ factors.mean(0, dtype=torch.float32)
            return (found if self.bias is None else found + self.bias.mean()) / numbers.temperature
        means = []
        tokens = max(1, LOGITS_AT_ONCE // len(self.weight))
        for part, thin in zip(self.hidden.split(tokens), states.split(tokens), strict=True):
            logits = torch.nn.functional.linear(part, self.weight, self.bias).float()
            logits += thin @ factors.T
            means.append(logits.div_(numbers.softcap).tanh_().mean(-1))
        return torch.cat(means) * (numbers.softcap / numbers.temperature)


LOGITS_AT_ONCE = 2**26  # where the mean needs each of them


def _in_one_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Head:
    """Return the tensors of a head in the dtype of the hidden states, unless autocast has one."""
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
    return _Head(hidden, weight, bias)


def _is_partitioned(weight: Tensor) -> bool:
    """Tell whether ZeRO-3 shares a matrix out, which TRL's own functions gather in both passes."""
    if hasattr(weight, "ds_id"):
        _warn_of_own("ZeRO-3 has partitioned the head")
        return True
    return False


def _warn_of_own(reason: str) -> None:
    warnings.warn(f"partita.integrations.trl: TRL's own function runs, as {reason}", stacklevel=3)


def _in_dtype(found: Tensor, logits: Tensor) -> Tensor:
    """Return a result in the dtype that TRL gives: its kernels for GPUs return fp32."""
    return found.to(logits.dtype) if logits.is_cpu else found


def _statistics(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None
) -> TokenStats:
    """Return the statistics of the rows, of which masked ones have log-probability 0."""
    labels, ignored = _with_ignored(index, row_mask)
    with Renamed({"target": "index"}):
        return token_stats(logits, labels, temperature=temperature, ignore_index=ignored)


def _with_ignored(index: Tensor, row_mask: Tensor | None) -> tuple[Tensor, int]:
    """Return the classes, those that are masked replaced by an ignored label, and that label."""
    if row_mask is None:
        return index.long(), checks.NOTHING_IGNORED
    return index.long().masked_fill(_masked(index, row_mask), NO_LABEL), NO_LABEL


def _masked(index: Tensor, row_mask: Tensor) -> Tensor:
    """Return where the mask is 0; raise unless it has the shape of the index."""
    checks.tensor("row_mask", row_mask)
    checks.shape("row_mask", row_mask, index.shape, "the shape of index")
    checks.device("row_mask", row_mask, index, "index")
    return row_mask == 0
