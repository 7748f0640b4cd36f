"""A causal language model of `transformers` whose head returns its loss and no logits.

Three parts of the model work together. Its forward pass notes the labels. The head, which the model
calls with its hidden states, computes the loss from them. The model's loss function returns that
loss. The head reads its matrix inside of its own forward pass, where FSDP2 and ZeRO-3 have gathered
it and tensor parallelism has made a DTensor of the hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature, unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..runtime import private_names
from .adapters import check_head, head_parts
from .fuse_report import HeadRuns
from .shards import replicated

STATE = "_partita_fused_head"  # the attribute of the model and of its head
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Cohere and Falcon-H1 multiply, and Granite divides.
SCALES = {"logit_scale": "*", "lm_head_multiplier": "*", "logits_scaling": "/"}
LAST = "call fuse(model) last"
LOSSES = ("ForCausalLMLoss", "causal_lm_loss")


class Request:
    """The arguments of a forward pass that its loss needs.

    Args:
        labels, shift_labels: `[..., T]`, or None.
        num_items_in_batch: what divides the sum of the losses; None for a mean.
        ignore_index: the label of positions without a loss.

    This is no tuple and no dataclass: the hooks of a sharded head replace the tensors that they
    find in its result, and the loss function has to recognise these.
    """

    def __init__(
        self,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items_in_batch: int | Tensor | None,
        ignore_index: int,
    ) -> None:
        self.labels, self.shift_labels = labels, shift_labels
        self.num_items_in_batch, self.ignore_index = num_items_in_batch, ignore_index


class HeadResult(NamedTuple):
    """What the head has computed, and for what."""

    loss: Tensor  # []
    request: Request  # what it was computed for
    shape: torch.Size  # of the logits
    steps: tuple[Any, ...] = ()  # the arithmetic of the model after the head


class SkippedLogits(HeadResult):
    """The result of the head, which stands for the logits.

    It notes the steps of a scale and a soft cap, and refuses all else that a model computes from
    logits. It is a tuple because FSDP2 and ZeRO-3 look for tensors in tuples: when the gradient of
    one that they have found arrives, they gather the matrix for the backward pass.
    """

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {REFUSED}")

    def after(self, *step: Any) -> SkippedLogits:
        return SkippedLogits(self.loss, self.request, self.shape, (*self.steps, *step))

    def __truediv__(self, divisor: Any) -> SkippedLogits:
        return self.after("/", divisor)

    def __mul__(self, factor: Any) -> SkippedLogits:
        return self.after("*", factor)

    __rmul__ = __mul__

    def _refuse(self, *operands: Any) -> Any:
        raise TypeError(REFUSED)

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __rtruediv__ = _refuse
    __getitem__ = __setitem__ = _refuse

    def tanh(self) -> SkippedLogits:
        return self.after("tanh")

    def itself(self, *args: Any, **kwargs: Any) -> SkippedLogits:
        return self

    float = contiguous = itself
    # What tensor parallelism does with the logits, which it expects to be a DTensor.
    redistribute = to_local = full_tensor = itself
    placements = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.tanh:
            return args[0].tanh()
        raise TypeError(f"{getattr(function, '__name__', function)}: {REFUSED}")


REFUSED = (
    "a fused model has no logits in training, from which this model or its head computes something"
    " other than a loss; call it with skip_logits=False, or undo partita's fuse with unfuse(model)"
)


class Arithmetic(NamedTuple):
    """The arithmetic between the logits of a head and its loss, as the configuration says."""

    scale: float  # the factor of the logits
    softcap: float | None  # of the scaled logits
    steps: tuple[Any, ...]  # the same as `SkippedLogits` notes it


def arithmetic_of(config: Any) -> Arithmetic:
    """Return what a configuration says about the logits."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale, steps = 1.0, tuple[Any, ...]()
    for name, sign in SCALES.items():
        if (number := getattr(text, name, None)) is not None:
            scale = number if sign == "*" else 1 / number
            steps = (sign, number)
    caps = (getattr(text, name, None) for name in SOFTCAPS)
    cap = next((cap for cap in caps if cap is not None), None)
    return Arithmetic(scale, cap, steps if cap is None else (*steps, "/", cap, "tanh", "*", cap))


class FusedHead:
    """The parts that replace those of one model. They are pickled and copied with it.

    Args:
        model: a causal language model of transformers.
        loss: `linear_causal_lm_loss`.
        options: further arguments of the loss.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], options: Mapping[str, Any]
    ) -> None:
        self.loss, self.options = loss, dict(options)
        self.request: Request | None = None
        self.arithmetic = arithmetic_of(getattr(model, "config", None))
        self.head = model.get_output_embeddings()  # type: ignore[operator]
        if self.head is None:
            raise TypeError(f"model: expected one with a head, got {type(model).__name__}")
        check_head(self.head)
        _refuse_other_losses(model)
        self.stock_loss: Callable[..., Any] = model.loss_function  # type: ignore[assignment]
        if (name := getattr(self.stock_loss, "__name__", str(self.stock_loss))) not in LOSSES:
            raise ValueError(f"model: expected one whose loss is {LOSSES[0]}, got {name}")
        self.own_loss = vars(model).get("_loss_function")
        self.own_forward = vars(model).get("forward")
        self.own_head_forward = vars(self.head).get("forward")
        _refuse_other_heads(model, self.head)
        self.runs, forward = HeadRuns(), FusedForward(model)
        body: nn.Module = getattr(model, "base_model", model)
        self.hooks = [model.register_forward_pre_hook(_refuse_replicas)]
        if body is not model:
            self.hooks.append(body.register_forward_pre_hook(forward.warn_if_replaced))
        names = list(signature(model.forward).parameters)
        self.position = names.index("labels") if "labels" in names else len(names)
        for module in (model, self.head):
            setattr(module, STATE, self)
        self.head.forward = self.head_forward
        model.forward = forward
        model.loss_function = self.loss_function  # type: ignore[assignment]

    def remove(self, model: nn.Module) -> None:
        """Give the model its own parts back."""
        for hook in self.hooks:
            hook.remove()
        for module, name, own in (
            (model, "_loss_function", self.own_loss),
            (model, "forward", self.own_forward),
            (self.head, "forward", self.own_head_forward),
        ):
            if own is None:
                delattr(module, name)
            else:
                setattr(module, name, own)
        for module in (model, self.head):
            delattr(module, STATE)

    def forward_of(self, model: Any) -> Callable[..., Any]:
        """Return the forward pass of the model without `fuse`."""
        own = self.own_forward
        return functools.partial(type(model).forward, model) if own is None else own

    def head_forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Compute the loss if a forward pass of the model has requested it, and else logits."""
        if self.request is None:
            if self.own_head_forward is not None:
                return self.own_head_forward(hidden_states, **kwargs)
            return type(self.head).forward(self.head, hidden_states, **kwargs)
        if kwargs:  # such as `adapter_names` of PEFT
            raise TypeError(f"lm_head: expected hidden states alone, got {', '.join(kwargs)} too")
        return self.compute(hidden_states)

    def run(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass of the model, without logits if they are not needed."""
        self.runs.is_running = True
        try:
            return self.run_pass(model, args, kwargs)
        finally:
            self.runs.is_running = False

    def run_pass(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self.forward_of(model)
        skip = kwargs.pop("skip_logits", None)
        by_position = self.position < len(args)
        labels = args[self.position] if by_position else kwargs.get("labels")
        shift_labels = kwargs.get("shift_labels")
        has_labels = labels is not None or shift_labels is not None
        if skip and not has_labels:
            raise ValueError("skip_logits: expected labels or shift_labels with it, got neither")
        self.request = None  # that of a forward pass that failed
        if not (model.training and has_labels if skip is None else skip):
            why = "skip_logits=False" if skip is not None else "evaluation"
            self.runs.count(why if has_labels else "no labels")
            return own(*args, **kwargs)
        if model.get_output_embeddings() is not self.head:
            raise RuntimeError(
                "model: expected the head that fuse(model) was given, got another, as by resizing"
                " the vocabulary or by PEFT adapters on the head, added or unloaded; call"
                " fuse(model) again"
            )
        self.request = Request(
            labels,
            shift_labels,
            kwargs.get("num_items_in_batch"),
            kwargs.get("ignore_index", -100),
        )
        if labels is None:  # The model calls its loss function only if it has labels.
            if by_position:
                args = (*args[: self.position], shift_labels, *args[self.position + 1 :])
            else:
                kwargs["labels"] = shift_labels
        output = own(*args, **kwargs)
        if self.request is not None:
            self.request = None
            is_replaced = vars(self.head).get("forward") != self.head_forward
            self.runs.warn(
                "the forward pass of its head was replaced"
                if is_replaced
                else "its forward pass did not call its head",
                LAST,
            )
            return output
        self.runs.count(None)
        return without_logits(output)

    def compute(self, hidden_states: Tensor) -> SkippedLogits:
        """Return the loss of the requested labels, from the input of the head."""
        request, self.request, scale = self.request, None, self.arithmetic.scale
        assert request is not None
        scaled = hidden_states if scale == 1 else hidden_states * scale
        weight, bias, low_rank = head_parts(self.head, scaled)
        if self.own_head_forward is not None:
            scaled = replicated(scaled, weight)
        loss = self.loss(
            scaled,
            weight,
            labels=request.labels,
            num_items_in_batch=request.num_items_in_batch,
            ignore_index=request.ignore_index,
            shift_labels=request.shift_labels,
            linear_bias=bias if scale == 1 or bias is None else bias * scale,
            low_rank=low_rank,
            softcap=self.arithmetic.softcap,
            **self.options,
        )
        shape = torch.Size((*hidden_states.shape[:-1], weight.shape[0]))
        return SkippedLogits(loss, request, shape)

    def loss_function(
        self, logits: Any, labels: Any = None, vocab_size: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the loss that the head has computed, or that of logits."""
        if not isinstance(logits, SkippedLogits):
            return self.stock_loss(logits, labels, vocab_size, *args, **kwargs)
        request = logits.request
        if logits.steps != self.arithmetic.steps:
            raise ValueError(
                "model: expected the arithmetic between head and loss that its configuration"
                f" names, {self.arithmetic.steps}, got {logits.steps}: {REFUSED}"
            )
        unchanged = (
            (labels is request.labels or request.labels is None)
            and kwargs.get("shift_labels") is request.shift_labels
            and kwargs.get("num_items_in_batch") is request.num_items_in_batch
            and kwargs.get("ignore_index", -100) == request.ignore_index
        )
        if not unchanged or vocab_size != logits.shape[-1]:
            raise ValueError(
                "model: expected one that passes on to its loss the labels and other arguments as"
                f" it gets them, and the size of the whole vocabulary: {REFUSED}"
            )
        return logits.loss


def without_logits(output: Any) -> Any:
    """Return the output of a model with None for the logits."""
    if not isinstance(output, Mapping):
        return tuple(None if isinstance(value, SkippedLogits) else value for value in output)
    fields = {name: v for name, v in output.items() if not isinstance(v, SkippedLogits)}
    if fields.get("loss") is None:
        raise ValueError(f"model: expected one that computes a loss from its logits: {REFUSED}")
    return type(output)(**fields)


class FusedForward:
    """The forward pass of a fused model.

    A bound method would be pickled by its name, which is that of the model's own forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, STATE).run(self.model, args, kwargs)

    def warn_if_replaced(self, body: nn.Module, args: Any) -> None:
        """Warn if the body of the model runs in training under another forward pass of the model.

        TRL's fused head is one, which calls the body and reads the matrix of the head.
        """
        is_training = body.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not is_training:
            return
        runs, forward = getattr(self.model, STATE).runs, vars(self.model).get("forward")
        if not runs.is_running and not isinstance(forward, FusedForward):
            # The names of a wrapped function may be those of the model's own forward pass.
            name = getattr(forward, "__globals__", {}).get("__name__", type(forward).__module__)
            is_trl = name.partition(".")[0] == "trl"
            runs.warn(
                f"its forward pass was replaced by one of {name}",
                "call partita.integrations.trl.patch() instead" if is_trl else LAST,
            )

    @property
    def __signature__(self) -> Signature:
        """The signature of the model's own forward pass, at which trainers look."""
        return signature(getattr(self.model, STATE).forward_of(self.model))

    @property
    def __func__(self) -> Callable[..., Any]:
        """The same as a function of the model too, which Accelerate wraps."""

        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(model, STATE).run(model, args, kwargs)

        first, own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), self.__signature__
        forward.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[first, *own.parameters.values()]
        )
        return forward


def _refuse_replicas(model: nn.Module, args: Any) -> None:
    if private_names.is_replica(model):
        raise RuntimeError(
            "model: expected one process for each GPU, as with DistributedDataParallel,"
            " got a replica of nn.DataParallel"
        )


def _refuse_other_losses(model: nn.Module) -> None:
    """Raise for a model that does not compute its loss from next tokens by its loss function."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"model: expected a causal language model, got {name}, an encoder with a decoder,"
            " whose labels are not the tokens that it reads"
        )
    for base in type(model).__mro__:
        if "forward" not in vars(base):
            continue
        code = getattr(unwrap(vars(base)["forward"]), "__code__", None)
        if code is None or "loss_function" in code.co_names:
            return
        if "super" not in code.co_names:
            break
    raise ValueError(
        "model: expected one whose forward pass gives the logits of its head to its loss_function,"
        f" got {name}, which computes its loss itself"
    )


def _refuse_other_heads(model: nn.Module, head: nn.Module) -> None:
    """Raise if a part of the model takes labels for another head, whose loss belongs to the sum."""
    for name, part in model.named_modules():
        is_model = part is not model and hasattr(part, "get_output_embeddings")
        if not is_model or "labels" not in signature(part.forward).parameters:
            continue
        if part.get_output_embeddings() is not head:
            raise ValueError(
                f"model: expected one head that has labels, got {type(model).__name__}, whose"
                f" {name}, {type(part).__name__}, has a head of its own"
            )
