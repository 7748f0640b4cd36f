"""The losses of causal language models and of Parakeet as `transformers` calls them, and decoding.

For causal language models, one function makes no fp32 copy of the logits, the other needs no
logits at all. `fuse` makes a model call the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..ops.cross_entropy.api import cross_entropy
from ..ops.cross_entropy.common import checked_options
from ..ops.cross_entropy.loss import cross_entropy_over
from ..ops.linear_heads.loss import linear_loss
from ..ops.linear_heads.low_rank import LowRank
from ..ops.rnnt.api import tdt_loss
from ..runtime import checks
from ..runtime.autograd import plain_eager
from ..runtime.dtypes import acc_dtype, fp32_result
from .fuse_report import FusedReport
from .fused_head import STATE, FusedHead
from .naming import Labels, Renamed, labels_read
from .shards import check_shards, is_sharded, sharded_loss

__all__ = [
    "FusedReport",
    "ParakeetForTDTLoss",
    "causal_lm_loss",
    "fuse",
    "fused",
    "linear_causal_lm_loss",
    "transducer",
    "unfuse",
]

Model = TypeVar("Model", bound=nn.Module)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    **kw: Any,
) -> Tensor:
    """Compute the cross-entropy of each token given the ones before it.

    Set it as the loss of a model: `model.loss_function = causal_lm_loss`.

    Args:
        logits: `[..., T, vocab_size]`, floating dtype; each position predicts the next token.
        labels: `[..., T]`, any integer dtype and device; the tokens themselves, which this
            function shifts. It does not read them if `shift_labels` is given.
        vocab_size: the number of classes in a row of logits.
        num_items_in_batch: what the sum is divided by, a number or a tensor; None for the mean
            over the labels that are not ignored.
        ignore_index: positions with this label have loss and gradient zero, and the mean does not
            count them.
        shift_labels: `[..., T]`, the label of each position, if the caller has shifted them.
        label_smoothing, softcap, z_loss: as in `partita.cross_entropy`.
        kw: other arguments that models pass; ignored.

    Returns:
        The loss in nats, a number, fp32 (fp64 for fp64). A mean over no labels is NaN.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, device or value; the message
            says what was expected.
        IndexError: a label is out of range and labels are checked (`PARTITA_CHECK`); otherwise
            the loss is NaN.

    Source: `ForCausalLMLoss` of transformers 5, 2025.

    Example:
        >>> import torch
        >>> from partita.integrations.transformers import causal_lm_loss
        >>> logits = torch.zeros(1, 3, 8, dtype=torch.bfloat16)
        >>> causal_lm_loss(logits, torch.tensor([[5, -100, 2]]), vocab_size=8)
        tensor(2.0794)
    """
    checks.floating("logits", logits)
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"vocab_size: expected an int of at least 1, got {vocab_size!r}")
    if logits.ndim == 0 or logits.numel() % vocab_size:
        raise ValueError(
            f"logits: expected shape [..., T, vocab_size] with vocab_size = {vocab_size},"
            f" got {list(logits.shape)}"
        )
    rows = logits.reshape(-1, vocab_size)
    given = labels_read(labels, shift_labels)
    target = _targets(given, ignore_index, len(rows), logits.device)

    def loss_of(reduction: str, denominator: float | Tensor | None) -> Tensor:
        options = checked_options(ignore_index, label_smoothing, softcap, z_loss, reduction)
        if denominator is not None:
            return cross_entropy_over(rows, target, denominator, options)
        with fp32_result(logits):
            loss = cross_entropy(rows, target, **options.keywords())
        return loss.to(acc_dtype(logits.dtype))

    with Renamed({}, given, vocab_size, ignore_index):
        return _over_items(num_items_in_batch, logits.device, loss_of)


def linear_causal_lm_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    memory_budget: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    final_logit_softcapping: float | None = None,
    **kw: Any,
) -> Tensor:
    """Compute `causal_lm_loss` from hidden states and the matrix of the head, without the logits.

    Args:
        hidden_states: `[..., T, H]`, floating dtype; the input of the model's last layer.
        lm_head_weight: `[vocab_size, H]` in the same dtype. Under tensor parallelism both are
            DTensors, the matrix with Shard(0), and so is the bias.
        labels, num_items_in_batch, ignore_index, shift_labels: as in `causal_lm_loss`.
        linear_bias: `[vocab_size]`.
        low_rank: as in `partita.linear_cross_entropy`.
        memory_budget: bytes of workspace, as in `partita.linear_cross_entropy`.
        label_smoothing, softcap, z_loss, kw: as in `causal_lm_loss`.
        final_logit_softcapping: the name of `softcap` in the configurations of models.

    Returns:
        The loss in nats, a number, fp32 (fp64 for fp64), differentiable in hidden states, matrix,
        bias and `low_rank`.

    Raises:
        TypeError, ValueError, IndexError: as in `causal_lm_loss` and
            `partita.linear_cross_entropy`.

    Source: as `causal_lm_loss`.

    Example:
        >>> import torch
        >>> from partita.integrations.transformers import linear_causal_lm_loss
        >>> hidden_states = torch.zeros(1, 3, 4)  # model.model(...).last_hidden_state
        >>> lm_head_weight = torch.ones(8, 4)  # model.lm_head.weight
        >>> labels = torch.tensor([[5, -100, 2]])
        >>> linear_causal_lm_loss(hidden_states, lm_head_weight, labels)
        tensor(2.0794)
    """
    loss_of_head: Callable[..., Tensor] = linear_loss
    if any(map(is_sharded, (hidden_states, lm_head_weight, linear_bias, *(low_rank or ())))):
        check_shards(hidden_states, lm_head_weight, linear_bias)
        loss_of_head = sharded_loss
    else:
        checks.floating("hidden_states", hidden_states)
        checks.floating("lm_head_weight", lm_head_weight)
    if lm_head_weight.ndim != 2:
        raise ValueError(
            f"lm_head_weight: expected shape [vocab_size, H], got {list(lm_head_weight.shape)}"
        )
    if None not in (softcap, final_logit_softcapping) and softcap != final_logit_softcapping:
        raise ValueError(
            f"softcap: expected one number, got {softcap} and"
            f" final_logit_softcapping {final_logit_softcapping}"
        )
    softcap = final_logit_softcapping if softcap is None else softcap
    shape = hidden_states.shape[:-1]
    given = labels_read(labels, shift_labels)
    target = _targets(given, ignore_index, shape.numel(), hidden_states.device)

    def loss_of(reduction: str, denominator: float | Tensor | None) -> Tensor:
        return loss_of_head(
            hidden_states,
            lm_head_weight,
            target.view(shape),
            linear_bias,
            None,
            checked_options(ignore_index, label_smoothing, softcap, z_loss, reduction),
            memory_budget,
            denominator,
            low_rank=low_rank,
        )

    names = {"input": "hidden_states", "linear_weight": "lm_head_weight"}
    with Renamed(names, given, lm_head_weight.shape[0], ignore_index):
        return _over_items(num_items_in_batch, hidden_states.device, loss_of)


def fuse(
    model: Model,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    memory_budget: int | None = None,
) -> Model:
    """Make a causal language model compute its training loss without logits.

    When the model is in training mode and is given `labels` or `shift_labels`, its output has the
    loss, and None for `logits`. `skip_logits=True` or `False` in a call decides otherwise.
    Evaluation and generation return logits as before. The soft cap and the scale of the logits are
    taken from the model's configuration. A warning says once if the head does not get the labels of
    a training step, as under a forward pass that replaces that of the model later. The
    model may be wrapped or sharded.

    Args:
        model: a causal language model of transformers with a linear head, which may share its
            matrix with the embedding; or such a model with PEFT adapters. On the head they may be
            LoRA, without variants, or a copy that PEFT trains and saves.
        label_smoothing, z_loss: as in `partita.cross_entropy`.
        memory_budget: bytes of workspace, as in `partita.linear_cross_entropy`.

    Returns:
        The model, which has changed. Its loss is in nats.

    Raises:
        TypeError: the model is none of transformers, or its head is neither a plain linear layer
            nor LoRA or `modules_to_save` of PEFT around one; DoRA, trainable tokens and quantized
            matrices are refused.
        ValueError: the loss of the model is not `ForCausalLMLoss`, or its forward pass does not
            call it; or the model is an encoder with a decoder, or has several heads with labels.
            The forward pass raises it for a model that computes something else from its logits,
            and for a head that is sharded otherwise than over its classes.

    Source: `linear_causal_lm_loss`; the argument `skip_logits` is that of Liger Kernel 0.6.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from partita.integrations.transformers import fuse
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        >>> config = LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes)
        >>> model = fuse(LlamaForCausalLM(config)).train()
        >>> input_ids = torch.tensor([[3, 14, 15, 9]])
        >>> output = model(input_ids, labels=input_ids)
        >>> output.loss.backward()
        >>> print(output.logits)
        None
        >>> model.eval()(input_ids).logits.shape
        torch.Size([1, 4, 50])
    """
    options = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "memory_budget": memory_budget,
    }
    base = _base_model("fuse", model)
    unfuse(base)
    FusedHead(base, linear_causal_lm_loss, options)
    return model


def unfuse(model: Model) -> Model:
    """Undo `fuse`; without it, do nothing.

    Args:
        model: a causal language model of transformers, or one with PEFT adapters.

    Returns:
        The model, whose output has logits again.

    Raises:
        TypeError: the model is none of transformers.

    Source: the counterpart of `fuse`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from partita.integrations.transformers import fuse, unfuse
        >>> config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
        >>> model = unfuse(fuse(GPT2LMHeadModel(config))).train()
        >>> input_ids = torch.tensor([[3, 14, 15, 9]])
        >>> model(input_ids, labels=input_ids).logits.shape
        torch.Size([1, 4, 50])
    """
    base = _base_model("unfuse", model)
    fused = vars(base).get(STATE)
    if fused is not None:
        fused.remove(base)
    return model


def fused(model: nn.Module) -> FusedReport | None:
    """Tell how often the head of a fused model has computed its loss without logits.

    Args:
        model: a causal language model of transformers, or one with PEFT adapters.

    Returns:
        The forward passes since `fuse` that computed the loss without logits, and those that made
        logits, with the reasons; None for a model that is not fused.

    Raises:
        TypeError: the model is none of transformers.

    Source: a counterpart of `fuse`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from partita.integrations.transformers import fuse, fused
        >>> config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
        >>> model, input_ids = fuse(GPT2LMHeadModel(config)), torch.tensor([[3, 14, 15, 9]])
        >>> output = model.train()(input_ids, labels=input_ids), model.eval()(input_ids)
        >>> fused(model)
        FusedReport(GPT2LMHeadModel, head lm_head, Linear: 1 forward passes without logits, 1 with
                    logits (1 × no labels))
    """
    base = _base_model("fused", model)
    state = vars(base).get(STATE)
    return None if state is None else state.runs.report(base, state.head)


def _base_model(function: str, model: Any) -> Any:
    """Return the model of transformers, around which PEFT may have put its own."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "get_output_embeddings") or not hasattr(base, "loss_function"):
        raise TypeError(
            f"model: expected a causal language model of transformers, got {type(base).__name__};"
            f" call {function} before DistributedDataParallel and torch.compile"
        )
    return base


def _targets(given: Labels, ignore_index: int, positions: int, device: torch.device) -> Tensor:
    """Return the label of each position, `[positions]`.

    It is the next token of the sequence; the last position of a sequence is ignored.
    """
    checks.python_int("ignore_index", ignore_index)
    target = given.tensor.long()  # a narrow type would wrap ignore_index
    if given.shifted:
        if target.ndim == 0:
            raise ValueError("labels: expected shape [..., T], got []")
        target = torch.nn.functional.pad(target, (0, 1), value=ignore_index)[..., 1:]
    if target.numel() != positions:
        raise ValueError(
            f"{given.name}: expected {positions} labels, one for each position,"
            f" got {target.numel()}, of shape {list(given.tensor.shape)}"
        )
    return target.reshape(-1).to(device)


def _over_items(
    num_items_in_batch: int | Tensor | None,
    device: torch.device,
    loss_of: Callable[[str, float | Tensor | None], Tensor],
) -> Tensor:
    """Return the mean of the losses, or their sum over the number of items.

    `loss_of` returns the loss of a reduction; the denominator of a sum is a number, a tensor `[]`
    on the device, or None. A number of items with a gradient or with several elements divides the
    sum afterwards.
    """
    items = num_items_in_batch
    if items is None:
        return loss_of("mean", None)
    if isinstance(items, bool) or not isinstance(items, (int, float, Tensor)):
        raise TypeError(
            f"num_items_in_batch: expected a number, a Tensor or None, got {type(items).__name__}"
        )
    if not isinstance(items, Tensor):
        return loss_of("sum", items)
    if items.requires_grad or items.numel() != 1 or items.is_complex():
        loss = loss_of("sum", None)
        return loss / items.to(loss.device)
    if items.is_cpu and device.type != "cpu" and plain_eager():
        loss = loss_of("sum", float(items))  # a copy to the device would wait for it
    else:
        loss = loss_of("sum", items.detach().reshape(()).to(device))
    return loss.to(torch.promote_types(loss.dtype, items.dtype)).reshape(items.shape)


def transducer(
    model: nn.Module,
) -> tuple[Callable[..., Any], Callable[..., Tensor], int, list[int] | None]:
    """Return what the searches of transducers take from a Parakeet RNN-T or TDT model.

    They take the encoder's output from the model's `get_audio_features`: its `pooler_output`, and
    `attention_mask.sum(-1)` as the lengths. The state of the predictor has the batch in dimension
    1, which is `state_dims=1`.

    Args:
        model: a `ParakeetForRNNT` or `ParakeetForTDT`, on any device.

    Returns:
        `(predict, join, blank, durations)`, as in `partita.rnnt_greedy_search`; the durations are
        None for RNN-T. Greedy search writes the tokens of the model's `generate`, which limits the
        labels on a frame by `config.max_symbols_per_step` for RNN-T and not at all for a TDT.

    Raises:
        TypeError: the model has no decoder and joint network.

    Source: `ParakeetForRNNT` and `ParakeetForTDT` of transformers 5, 2026.

    Example:
        >>> import torch, partita
        >>> from transformers import ParakeetForTDT, ParakeetTDTConfig
        >>> from partita.integrations.transformers import transducer
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> encoder = {**sizes, "intermediate_size": 8, "subsampling_conv_channels": 4}
        >>> names = {"vocab_size": 5, "blank_token_id": 4, "decoder_hidden_size": 8}
        >>> model = ParakeetForTDT(ParakeetTDTConfig(encoder_config=encoder, **names)).eval()
        >>> features, mask = torch.randn(2, 64, 80), torch.ones(2, 64, dtype=torch.int64)
        >>> predict, join, blank, durations = transducer(model)
        >>> with torch.no_grad():
        ...     heard = model.get_audio_features(features, mask, output_attention_mask=True)
        >>> found = partita.rnnt_beam_search(
        ...     heard.pooler_output, heard.attention_mask.sum(-1), predict, join,
        ...     blank=blank, durations=durations, state_dims=1, beam_width=4,
        ... )
        >>> found.tokens.shape  # [B, nbest, S]
        torch.Size([2, 1, 16])
    """
    decoder: Any = getattr(model, "decoder", None)
    joint: Any = getattr(model, "joint", None)
    config: Any = getattr(model, "config", None)
    if joint is None or not hasattr(decoder, "lstm") or not hasattr(config, "blank_token_id"):
        raise TypeError(
            f"model: expected a ParakeetForRNNT or ParakeetForTDT, got {type(model).__name__}"
        )

    def predict(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = decoder.lstm(decoder.embedding(tokens[:, None]), state)
        return decoder.decoder_projector(output)[:, 0], state

    def join(frames: Tensor, output: Tensor) -> Tensor:
        logits: Tensor = joint(decoder_hidden_states=output, encoder_hidden_states=frames)
        return logits

    durations = getattr(config, "durations", None)
    return predict, join, config.blank_token_id, None if durations is None else list(durations)


def ParakeetForTDTLoss(
    token_logits: Tensor,
    duration_logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    label_lengths: Tensor,
    blank_token_id: int,
    durations: Sequence[int],
    sigma: float = 0.0,
    reduction: str = "mean",
    **kw: Any,
) -> Tensor:
    """Compute the loss of `ParakeetForTDT`.

    Set it as the loss of a model: `model.loss_function = ParakeetForTDTLoss`.

    Args:
        token_logits: `[B, T, U + 1, V]` floating.
        duration_logits: `[B, T, U + 1, K]`, of the same dtype.
        labels: `[B, U]` integers, on any device.
        logit_lengths, label_lengths: `[B]` integers, on any device.
        blank_token_id, durations, sigma, reduction: as in `partita.tdt_loss`.
        kw: other arguments that models pass; ignored.

    Returns:
        The loss in nats, a number or `[B]`, fp32 (fp64 for fp64). It is finite for an empty target,
        for which transformers divides by 0.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.tdt_loss`.

    Source: the function of this name in transformers; the method is the one of `partita.tdt_loss`.

    Example:
        >>> import torch
        >>> from partita.integrations.transformers import ParakeetForTDTLoss
        >>> tokens, durations = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2, 2)
        >>> lengths = torch.tensor([3]), torch.tensor([1])
        >>> ParakeetForTDTLoss(tokens, durations, torch.tensor([[2]]), *lengths, 3, [0, 1])
        tensor(5.3733)
    """
    targets = labels.to(token_logits.device)
    inputs = (token_logits, duration_logits, targets, logit_lengths, label_lengths)
    with Renamed({"targets": "labels", "target_lengths": "label_lengths"}):
        return tdt_loss(*inputs, blank_token_id, durations, sigma, reduction)
