"""From hidden states: the loss alone, and with its gradients.

Partita runs under the plan that saves all logits (partita-fast) and the plan that saves a few
classes at a time (partita-lean). The unit is the time of the bare matrix products (products). The
error is bounded by that of PyTorch's composition in the same dtype, and the error of peers by 5e-2.

Divergences of two heads: the same, for beta 0, 0.5 and 1, beside a loop over chunks of tokens whose
logits are computed again (chunked). Four products are the unit, and partita-lean has two fifths of
the memory of the logits. Divergences of rows of logits have the same bounds. So have distillation
losses of two heads, of 2 terms (hard, kl) and of 4 (jsd and tv too).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..ops.divergence.api import divergence
from ..ops.linear_heads.api import linear_cross_entropy
from ..ops.linear_heads.divergence import linear_distillation_loss, linear_divergence
from ..ops.linear_heads.low_rank import LoRA
from ..ops.linear_heads.plan import linear_cross_entropy_plan
from ..ops.linear_heads.truncated import linear_truncated_stats
from ..runtime.caches import register_cache
from ..runtime.dtypes import acc_dtype
from ..testing.samples import in_torch
from .case import (
    Attempt,
    Buffers,
    Case,
    Function,
    Functions,
    Limited,
    Moves,
    Provider,
    Settings,
    Sizes,
    Widths,
    cases_of,
    given,
    load,
    needs_gpu,
)
from .paths import Gradient, PartsCase, Truth, evenly
from .rows import RULES

# The bound of Partita is this multiple of PyTorch's error, as in the contract, plus the slack.
TOLERANCE = 2.0
PEER_BOUND = 5e-2  # relative to the greatest gradient, and to the loss
# A peer that leaves out small gradients has none for classes that are no token's label.
PEER_BOUND_OTHERS = 1.5
TOKENS_JUDGED, CLASSES_JUDGED = 64, 32  # classes that are labels, and that number of others
ELEMENTS_AT_ONCE = 2**25  # logits in fp64 that are in memory together
ALL_LOGITS = 2**62  # bytes, which hold any logits
LEAN = 7 * 2**26  # bytes
CHUNK_TOKENS = 1024  # tokens of a chunk of the recomputed loop
BETAS = (0.0, 0.5, 1.0)
RANK, SCALE = 16, 2.0  # of LoRA
TERMS = {"hard": 0.4, "kl": 0.3, "jsd": 0.2, "tv": 0.1}
DIVERGENCE_WIDTHS, DIVERGENCE_QUICK_WIDTHS = (32768, 128256), (128256,)

FULL_SIZES = (  # tokens, hidden numbers and classes
    (8192, 4096, 128256),
    (16384, 2048, 262144),
    (8192, 2048, 32768),
    (4096, 4096, 128256),
)
SIZES = Sizes(FULL_SIZES, FULL_SIZES[2:3], [(256, 128, 4000)], [(128, 64, 1000)])


class LinearInputs(NamedTuple):
    hidden: Tensor  # [tokens, hidden]
    matrix: Tensor  # [vocabulary, hidden]
    target: Tensor  # [tokens]


class LoRAInputs(NamedTuple):
    hidden: Tensor  # [tokens, hidden]
    A: Tensor  # [RANK, hidden]
    B: Tensor  # [vocabulary, RANK]
    matrix: Tensor  # [vocabulary, hidden], frozen
    target: Tensor  # [tokens]


class DivergenceInputs(NamedTuple):
    hidden: Tensor  # [tokens, hidden]
    matrix: Tensor  # [vocabulary, hidden]
    teacher_hidden: Tensor  # [tokens, hidden]
    teacher_matrix: Tensor  # [vocabulary, hidden]
    beta: float


class DistillationInputs(NamedTuple):
    hidden: Tensor  # [tokens, hidden]
    matrix: Tensor  # [vocabulary, hidden]
    teacher_hidden: Tensor  # [tokens, hidden]
    teacher_matrix: Tensor  # [vocabulary, hidden]
    target: Tensor  # [tokens]
    terms: int


class RowInputs(NamedTuple):
    logits: Tensor  # [rows, columns]
    teacher_logits: Tensor  # [rows, columns]
    beta: float


def composed_loss(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    """Compute all logits and then their loss with PyTorch's ops."""
    return F.cross_entropy(F.linear(hidden, matrix), target)


def lora_loss(hidden: Tensor, A: Tensor, B: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, matrix, target, low_rank=LoRA(A, B, SCALE))


def composed_lora_loss(
    hidden: Tensor, A: Tensor, B: Tensor, matrix: Tensor, target: Tensor
) -> Tensor:
    """Compute all logits as a layer of PEFT does, and then their loss."""
    of_adapter = F.linear(F.linear(hidden, A), B) * SCALE
    return F.cross_entropy(F.linear(hidden, matrix) + of_adapter, target)


def rows_of_logits(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """Compute the divergence of each row with PyTorch's ops, in fp32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logp, logq = logits.log_softmax(-1, dtype=dtype), teacher_logits.log_softmax(-1, dtype=dtype)
    if beta in (0.0, 1.0):
        first, second = (logq, logp) if beta == 0 else (logp, logq)
        return F.kl_div(second, first, reduction="none", log_target=True).sum(-1)
    weights = logp.new_tensor([beta, 1 - beta]).log()
    mixture = torch.logaddexp(logq + weights[0], logp + weights[1])
    teacher, student = (
        F.kl_div(mixture, each, reduction="none", log_target=True).sum(-1) for each in (logq, logp)
    )
    return beta * teacher + (1 - beta) * student


def mean_of_logits(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """Compute the mean divergence of rows of logits with PyTorch's ops."""
    return rows_of_logits(logits, teacher_logits, beta).mean()


def composed_divergence(*inputs: Any) -> Tensor:
    """Compute all logits and then their mean divergence with PyTorch's ops."""
    hidden, matrix, teacher_hidden, teacher_matrix, beta = inputs
    logits, teacher_logits = F.linear(hidden, matrix), F.linear(teacher_hidden, teacher_matrix)
    return mean_of_logits(logits, teacher_logits, beta)


def first_terms(number: int) -> dict[str, float]:
    """Return the weights of the first terms."""
    return dict([*TERMS.items()][:number])


def composed_distillation(*inputs: Any) -> Tensor:
    """Compute all logits and then their distillation loss with PyTorch's ops."""
    hidden, matrix, teacher_hidden, teacher_matrix, target, terms = inputs
    heads = F.linear(hidden, matrix), F.linear(teacher_hidden, teacher_matrix)
    return in_torch.distillation(*heads, target, weights=first_terms(terms))[0]


def chunked_divergence(*inputs: Any) -> Tensor:
    """Compute the mean over chunks of tokens, whose logits are computed again for the gradient."""
    hidden, matrix, teacher_hidden, teacher_matrix, beta = inputs

    def chunk_sum(x: Tensor, t: Tensor) -> Tensor:
        return rows_of_logits(F.linear(x, matrix), F.linear(t, teacher_matrix), beta).sum()

    chunks = zip(hidden.split(CHUNK_TOKENS), teacher_hidden.split(CHUNK_TOKENS), strict=True)
    sums = [checkpoint(chunk_sum, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum() / len(hidden)


def truncated_loss(*inputs: Tensor) -> Tensor:
    return -linear_truncated_stats(*inputs, **RULES).logprob.mean()


def composed_truncated_loss(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    """Compute all logits, and sort them to find the classes that are kept."""
    return -in_torch.truncated_stats(F.linear(hidden, matrix), target, **RULES)[0].mean()


def torch_linear() -> Function:
    """Return PyTorch's own op, which computes some tokens at a time."""
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda *inputs: F.linear_cross_entropy(*inputs, options=options)


TORCH: dict[str, Function] = {
    "linear_cross_entropy": composed_loss,
    "linear_cross_entropy_lora": composed_lora_loss,
    "divergence": mean_of_logits,
    "linear_divergence": composed_divergence,
    "linear_distillation_loss": composed_distillation,
    "linear_truncated_stats": composed_truncated_loss,
}


class _Products(torch.autograd.Function):
    """The bare products of a head: logits, after those of a teacher if there is one, and gradients.

    The logits are computed into existing memory, and count as their own gradient.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, logits: Tensor, *teacher: Any) -> Tensor:
        if teacher:
            torch.mm(teacher[0], teacher[1].T, out=logits)
        torch.mm(hidden, matrix.T, out=logits)
        ctx.save_for_backward(hidden, matrix)
        ctx.logits, ctx.others = logits, [None] * (1 + len(teacher))
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, matrix = ctx.saved_tensors
        of_matrix = torch.mm(ctx.logits.T, hidden) if ctx.needs_input_grad[1] else None
        return torch.mm(ctx.logits, matrix), of_matrix, *ctx.others


def products() -> Function:
    buffer: list[Tensor] = []

    def function(hidden: Tensor, matrix: Tensor, *others: Any) -> Tensor:
        if not buffer:
            buffer.append(hidden.new_empty(len(hidden), len(matrix)))
        teacher = others[:2] if len(others) > 1 else ()
        return _Products.apply(hidden, matrix, buffer[0], *teacher)

    return function


def frozen_products() -> Function:
    """Return the two products of a frozen matrix, and gradients 0 of the factors of low rank."""
    bare = products()

    def function(hidden: Tensor, A: Tensor, B: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
        return bare(hidden, matrix, target) + 0 * (A.sum() + B.sum())

    return function


def partita_linear(budget: Callable[..., int]) -> Function:
    return lambda *inputs: linear_cross_entropy(*inputs, memory_budget=budget(*inputs))


def partita_divergence(budget: Callable[..., int]) -> Function:
    return lambda *inputs: linear_divergence(
        *inputs[:4], beta=inputs[4], memory_budget=budget(*inputs)
    )


def partita_distillation(budget: Callable[..., int]) -> Function:
    return lambda *inputs: (
        linear_distillation_loss(
            *inputs[:5], weights=first_terms(inputs[5]), memory_budget=budget(*inputs)
        ).loss
    )


def fast_budget(*inputs: Any) -> int:
    return ALL_LOGITS


def lean_budget(hidden: Tensor, matrix: Tensor, target: Tensor) -> int:
    return _lean_budget(*hidden.shape, len(matrix), hidden.dtype)


@functools.lru_cache(maxsize=256)
def _lean_budget(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return a budget in bytes, which is halved until the plan is lean or no plan fits."""
    plan = functools.partial(linear_cross_entropy_plan, tokens, hidden, vocabulary, dtype)
    budget = LEAN
    try:
        while plan(memory_budget=budget).name != "lean":
            budget //= 2
            plan(memory_budget=budget, input_grad=False, weight_grad=False)
    except ValueError:
        budget *= 2
    return budget


register_cache("bench.heads.lean_budgets", _lean_budget.cache_clear)


def lean_divergence_budget(*inputs: Any) -> int:
    """Return two fifths of the bytes of the logits of both heads."""
    hidden, matrix, *_ = inputs
    logits_bytes = 2 * len(hidden) * len(matrix) * hidden.element_size()
    return max(logits_bytes * 2 // 5, 2**20)


def cut_cross_entropy(*, exact: bool = False) -> Function:
    """Return the loss of cut-cross-entropy, which leaves out small gradients unless it is `exact`.

    Older versions have no name for the exact implementation.
    """
    library: Any = importlib.import_module("cut_cross_entropy")
    named = hasattr(library.LinearCrossEntropyImpl, "CCE_EXACT")
    options: dict[str, Any] = (
        {} if not exact else {"impl": "cce_exact"} if named else {"filter_eps": None}
    )
    return lambda *inputs: library.linear_cross_entropy(*inputs, **options)


def beyond_cut_cross_entropy(inputs: LinearInputs) -> str | None:
    return needs_gpu(inputs) or beyond_quack(inputs)


LIGER = "liger_kernel.ops"


def liger() -> Function:
    name = "LigerFusedLinearCrossEntropyFunction.apply"
    apply = load(f"{LIGER}.fused_linear_cross_entropy", name)()
    return lambda *inputs: apply(*inputs)[0]


def liger_divergence() -> Function:
    """Return the mean of Liger's fused linear Jensen-Shannon divergence."""
    apply = load(f"{LIGER}.fused_linear_jsd", "LigerFusedLinearJSDFunction.apply")()
    return lambda *inputs: apply(*inputs[:4], None, inputs[4])


# Liger's loss with kernels in CuTe for one architecture.
liger_cute = load(
    f"{LIGER}.cutedsl.ops.fused_linear_cross_entropy_sm90", "liger_fused_linear_cross_entropy_sm90"
)


def beyond_liger_cute(inputs: LinearInputs) -> str | None:
    device = inputs.hidden.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a GPU of compute capability 9.0"
    if inputs.hidden.dtype != torch.bfloat16:
        return "takes bf16 only"
    if len(inputs.target) % 128 or len(inputs.matrix) % 256:
        return "takes multiples of 128 tokens and of 256 classes"
    return None


def quack() -> Function:
    """Return QuACK's loss.

    Version 0.6.5 refuses values for its cache of kernels that come with newer versions of
    nvidia-cutlass-dsl. They get a key by their type here.
    """
    identity: Any = importlib.import_module("quack.gemm_runtime.identity")
    strict = identity.semantic_value_key
    if not hasattr(strict, "__wrapped__"):

        @functools.wraps(strict)
        def by_type(value: Any, seen: Any) -> Any:
            try:
                return strict(value, seen)
            except TypeError:
                return "type", type(value).__module__, type(value).__qualname__

        identity.semantic_value_key = by_type
    return importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy


def beyond_quack(inputs: LinearInputs) -> str | None:
    return None if inputs.hidden.dtype.itemsize == 2 else "takes fp16 and bf16 only"


PROVIDERS: Functions = {
    "partita": {
        "divergence": lambda: (
            lambda logits, teacher_logits, beta: divergence(logits, teacher_logits, beta=beta)
        ),
        "linear_truncated_stats": given(truncated_loss),
        "linear_cross_entropy_lora": given(lora_loss),
    },
    "partita-fast": {
        "linear_cross_entropy": lambda: partita_linear(fast_budget),
        "linear_divergence": lambda: partita_divergence(fast_budget),
        "linear_distillation_loss": lambda: partita_distillation(fast_budget),
    },
    "partita-lean": {
        "linear_cross_entropy": lambda: partita_linear(lean_budget),
        "linear_divergence": lambda: partita_divergence(lean_divergence_budget),
        "linear_distillation_loss": lambda: partita_distillation(lean_divergence_budget),
    },
    "products": {
        **dict.fromkeys(
            (
                "linear_cross_entropy",
                "linear_divergence",
                "linear_distillation_loss",
                "linear_truncated_stats",
            ),
            products,
        ),
        "linear_cross_entropy_lora": frozen_products,
    },
    "torch-linear": {"linear_cross_entropy": torch_linear},
    "chunked": {"linear_divergence": lambda: chunked_divergence},
    "quack": {"linear_cross_entropy": Limited(quack, beyond_quack)},
    "liger": {"linear_cross_entropy": liger, "linear_divergence": liger_divergence},
    "liger-cute": {"linear_cross_entropy": Limited(liger_cute, beyond_liger_cute)},
    "cce": {"linear_cross_entropy": Limited(cut_cross_entropy, beyond_cut_cross_entropy)},
    "cce-exact": {
        "linear_cross_entropy": Limited(
            lambda: cut_cross_entropy(exact=True), beyond_cut_cross_entropy
        )
    },
}


def sample(leaf: int, rows: Tensor, truth: Tensor, peer_bound: float = PEER_BOUND) -> Gradient:
    """Return some rows of a gradient, whose error is relative to the greatest of these numbers."""
    return Gradient(leaf, rows, truth, truth.abs().max(), peer_bound)


class MeanCase(PartsCase):
    """A mean loss with its gradients."""

    @property
    def at_once(self) -> int:
        return max(1, ELEMENTS_AT_ONCE // self.shape[1])

    def exact(self, inputs: Any) -> Tensor:
        return TORCH[self.op](*inputs) * (len(inputs[0]) / self.shape[0])

    def samples(self, inputs: Any, gradients: Sequence[Tensor]) -> list[Gradient]:
        """Return what is judged of the true gradients."""
        rows = torch.arange(len(gradients[0]), device=gradients[0].device)
        return [sample(0, rows, gradients[0])]

    def truth(self, inputs: Any) -> Truth:
        loss, gradients = self.truth_in_parts(inputs)
        return Truth(loss, ..., self.samples(inputs, gradients))

    def standard(self, inputs: Any) -> Truth:
        truth = self.truth(inputs)
        try:
            attempt = Attempt(TORCH[self.op], inputs, Provider("torch", {}))
            own = [verdict.error for verdict in self.compared(attempt, truth)]
        except torch.OutOfMemoryError:  # PyTorch has all logits several times
            own = [PEER_BOUND] * (2 + len(truth.gradients))
        return truth._replace(own=own)

    def slack(self, dtype: torch.dtype) -> float:
        """Return the slack of a dtype; the last rounding of half types is most of the error."""
        return torch.finfo(dtype).eps / 4 if dtype.itemsize == 2 else 1e-5

    def loss_slack(self) -> float:
        return self.slack(self.dtype)

    def bounds(self, provider: Provider, standard: Truth) -> Sequence[float]:
        gradients = standard.gradients
        if not provider.is_ours:
            return [gradient.peer_bound for gradient in gradients] + [PEER_BOUND] * 2
        slack = [self.slack(self.dtype)] * len(gradients) + [self.loss_slack()] * 2
        return [TOLERANCE * own + more for own, more in zip(standard.own, slack, strict=True)]


@dataclass(frozen=True)
class HeadCase(MeanCase):
    """A mean loss from hidden states, which matrix products bound."""

    tokens: int
    hidden: int
    vocabulary: int

    sizes: ClassVar[tuple[str, ...]] = ("tokens", "hidden", "vocabulary")
    dimensions = ("tokens", "vocabulary")
    yardstick = "products"
    learned = 2
    width, least_width = "vocabulary", 2
    shrinks: ClassVar[Mapping[str, int]] = {"tokens": 1}

    def head(self, buffers: Buffers, name: str = "") -> tuple[Tensor, Tensor]:
        """Return hidden states and a matrix, whose logits have variance 1."""
        matrix = buffers.normal(f"{name}matrix", (self.vocabulary, self.hidden), self.dtype)
        hidden = buffers.normal(f"{name}hidden", (self.tokens, self.hidden), self.dtype)
        return hidden, matrix * self.hidden**-0.5


class LinearCrossEntropy(HeadCase):
    """The mean loss, which is bounded by three matrix products, one of them in the forward pass."""

    caption = "Cross-entropy from hidden states and its gradients"
    dims: ClassVar[tuple[int | None, ...]] = (0, None, 0)
    judged = 2

    def inputs(self, buffers: Buffers) -> LinearInputs:
        return LinearInputs(*self.head(buffers), buffers.labels(self.tokens, self.vocabulary))

    def slack(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps * (1 / 4 if dtype.itemsize == 2 else 16)

    def loss_slack(self) -> float:
        return self.slack(acc_dtype(self.dtype))

    def samples(self, inputs: LinearInputs, gradients: Sequence[Tensor]) -> list[Gradient]:
        """Judge some tokens, some classes that are labels, and some that are not."""
        hidden, matrix = gradients
        target, classes = inputs.target, len(matrix)
        which = evenly(TOKENS_JUDGED, self.tokens, target.device)
        samples = [sample(0, which, hidden[which])]
        labels = torch.bincount(target, minlength=classes) > 0
        for group, peer_bound in ((labels, PEER_BOUND), (~labels, PEER_BOUND_OTHERS)):
            candidates = group.nonzero().squeeze(1)
            if len(candidates):
                which = candidates[evenly(CLASSES_JUDGED, len(candidates), target.device)]
                samples.append(sample(1, which, matrix[which], peer_bound))
        return samples


class LinearLoRA(LinearCrossEntropy):
    """The mean loss of a frozen matrix with LoRA beside it: two products, and some thin ones."""

    caption = "Cross-entropy from hidden states, a frozen matrix and LoRA, and its gradients"
    dims = (0, None, None, None, 0)
    judged = learned = 3

    def inputs(self, buffers: Buffers) -> LoRAInputs:  # type: ignore[override]
        hidden, matrix = self.head(buffers)
        A = buffers.normal("A", (RANK, self.hidden), self.dtype) * self.hidden**-0.5
        B = buffers.normal("B", (self.vocabulary, RANK), self.dtype) * (0.5 / RANK)
        target = buffers.labels(self.tokens, self.vocabulary)
        return LoRAInputs(hidden, A, B, matrix, target)

    def samples(self, inputs: Any, gradients: Sequence[Tensor]) -> list[Gradient]:
        """Judge some tokens, the factor of the hidden states, and some classes of the other."""
        hidden, A, B = gradients
        of_hidden, *of_classes = super().samples(inputs, (hidden, B))
        everything = torch.arange(RANK, device=A.device)
        return [of_hidden, sample(1, everything, A), *(x._replace(leaf=2) for x in of_classes)]


class LinearTruncated(LinearCrossEntropy):
    """The mean of minus the log-probabilities over what top-k, top-p and the label keep."""

    caption = "Log-probabilities over kept classes from hidden states, and their gradients"


@dataclass(frozen=True)
class LinearDivergence(HeadCase):
    """The mean divergence of two heads, which is bounded by four matrix products."""

    beta: float = BETAS[0]

    sizes = ("tokens", "hidden", "vocabulary", "beta")
    dims = (0, None, 0, None, None)

    def inputs(self, buffers: Buffers) -> DivergenceInputs:
        return DivergenceInputs(*self.head(buffers), *self.head(buffers, "teacher "), self.beta)


@dataclass(frozen=True)
class LinearDistillation(HeadCase):
    """The mean distillation loss of two heads, which is bounded by four matrix products."""

    terms: int = 2

    sizes = ("tokens", "hidden", "vocabulary", "terms")
    dims = (0, None, 0, None, 0, None)

    def inputs(self, buffers: Buffers) -> DistillationInputs:
        heads = *self.head(buffers), *self.head(buffers, "teacher ")
        target = buffers.labels(self.tokens, self.vocabulary)
        return DistillationInputs(*heads, target, self.terms)


@dataclass(frozen=True)
class DivergenceRows(MeanCase):
    """The mean divergence of logits, which reads both once and writes the gradient."""

    rows: int
    columns: int
    beta: float

    sizes = ("rows", "columns", "beta")
    dimensions = ("rows", "columns")
    dims = (0, 0, None)
    learned = 1
    work: ClassVar[Mapping[str, Moves]] = {
        "inference": Moves(2, "read"),
        "total": Moves(3, "copy"),
    }

    def inputs(self, buffers: Buffers) -> RowInputs:
        logits = buffers.normal("logits", self.shape, self.dtype)
        teacher_logits = buffers.normal("teacher logits", self.shape, self.dtype)
        return RowInputs(logits, teacher_logits, self.beta)

    def bounds(self, provider: Provider, standard: Truth) -> Sequence[float]:
        """Return bounds that are the same for all providers."""
        return super().bounds(Provider("partita", {}), standard)


linear_cross_entropy_cases = cases_of(
    {"linear_cross_entropy": (LinearCrossEntropy, SIZES)}, torch.bfloat16
)
_widths = Widths(DIVERGENCE_WIDTHS, DIVERGENCE_QUICK_WIDTHS, [(beta,) for beta in BETAS])
of_logits = cases_of({"divergence": (DivergenceRows, _widths)}, torch.bfloat16)
of_two_heads = cases_of({"linear_divergence": (LinearDivergence, SIZES)}, torch.bfloat16)
of_terms = cases_of({"linear_distillation_loss": (LinearDistillation, SIZES)}, torch.bfloat16)


def divergence_cases(settings: Settings) -> Iterator[Case]:
    """Yield the cases of rows of logits, and then those of two heads."""
    yield from of_logits(settings)
    cases: Iterator[Any] = of_two_heads(settings)
    yield from (replace(case, beta=beta) for case in cases for beta in BETAS)
    distillation: Iterator[Any] = of_terms(settings)
    yield from (replace(case, terms=terms) for case in distillation for terms in (2, 4))


OPS = {
    "linear_cross_entropy": linear_cross_entropy_cases,
    "linear_cross_entropy_lora": cases_of(
        {"linear_cross_entropy_lora": (LinearLoRA, SIZES)}, torch.bfloat16
    ),
    "linear_truncated_stats": cases_of(
        {"linear_truncated_stats": (LinearTruncated, SIZES)}, torch.bfloat16
    ),
    "divergence": divergence_cases,
}
