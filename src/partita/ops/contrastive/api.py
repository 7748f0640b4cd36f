"""The contrastive losses of CLIP and SigLIP from features."""

from __future__ import annotations

from torch import Tensor

from ...runtime.autograd import apply
from ...runtime.backend import current_backend
from .autograd import ContrastiveLoss
from .common import checked_inputs


def contrastive_loss(
    a: Tensor,
    b: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    kind: str = "softmax",
    symmetric: bool = True,
    memory_budget: int | None = None,
) -> Tensor:
    """Compute the loss of N pairs of features, as CLIP and SigLIP have it, without all logits.

    Row i of `a` and row i of `b` are a pair. The logits are `logit_scale * a @ b.T + logit_bias`,
    `[N, N]`, and exist for a chunk of rows at a time. `kind="softmax"` is the mean of the
    cross-entropies of rows and of columns, whose target is the diagonal. `kind="sigmoid"` is the
    sum of the binary cross-entropies of all logits, true on the diagonal, divided by N.

    Args:
        a: features `[N, D]`, floating dtype, any strides. They are not normalised here.
        b: features `[N, D]` in the dtype of `a`. Without `symmetric` there may be more rows, which
            are hard negatives: they are columns that are no row's pair.
        logit_scale: a number, or a tensor `[]` or `[1]` of a floating dtype; not its logarithm.
        logit_bias: a number or a tensor as the scale, or None for 0. It cancels in a softmax.
        kind: `softmax` or `sigmoid`.
        symmetric: whether a softmax has the cross-entropies of columns too; without it the loss is
            that of rows alone. A sigmoid has none of columns.
        memory_budget: bytes of workspace for logits, None for 2 GiB. All of them stay in memory up
            to the backward pass if they fit, with room for their gradient. Otherwise the backward
            pass computes them again, which is one product more. On Hopper they stay in half types
            as codes of 16 bits.

    Returns:
        The mean loss of the pairs in nats, `[]`, fp32 (fp64 for fp64); NaN for none. It is
        differentiable in `a`, `b`, `logit_scale` and `logit_bias`, whose gradients have their
        dtypes. Under autocast the features are cast to its dtype.

        The logits, their log-sum-exps and the gradients of scale and bias are in fp32 for half
        types (fp64 for fp64). The gradient of the logits is rounded to the dtype of the features
        before its products with them, which are added up in fp32. Codes give a logit in gradients
        with an error of 2**-9 at most; where it would be more, the backward pass computes the
        logits again. Equal calls have equal bits.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected,
            or a budget below one row of logits.

    Source: Radford et al., Learning transferable visual models from natural language supervision,
    2021; Zhai et al., Sigmoid loss for language image pre-training, 2023; Gao et al., Scaling deep
    contrastive learning batch size under memory limited setup, 2021, for chunks.

    Example:
        >>> import torch, partita
        >>> a, b = torch.eye(3, requires_grad=True), torch.eye(3)
        >>> loss = partita.contrastive_loss(a, b, logit_scale=2.0)
        >>> loss.detach()
        tensor(0.2395)
        >>> torch.autograd.grad(loss, a)[0][0]
        tensor([-0.1420,  0.0710,  0.0710])
    """
    inputs = checked_inputs(a, b, logit_scale, logit_bias, kind, symmetric, memory_budget)
    save = inputs.saves(inputs.b.shape[0])
    loss: Tensor = apply(ContrastiveLoss, *inputs, save, current_backend())[0]
    return loss
