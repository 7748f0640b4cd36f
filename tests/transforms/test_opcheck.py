"""torch.library.opcheck on each registered op.

It tests the schema, the fake, the autograd registration and AOT dispatch.
"""

import functools
from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers.chains import random_chain
from helpers.linear_chains import random_linear_chain
from helpers.rows import INTERPRETING, class_weights, devices, targets_for
from helpers.semi_markov import random_semi_markov

import partita
import partita.parallel  # registers its ops
from partita.testing import sample_rows

BACKEND = "triton" if INTERPRETING else "auto"
N, C = 4, 7


@functools.cache  # opcheck works on copies
def samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    x = sample_rows(N, C, device=device)
    half = x.half()
    images = sample_rows(N, C * 6, device=device).reshape(N, C, 2, 3)
    labels = targets_for(x, "labels", ignored=-100)
    pixels = targets_for(images, "labels")
    probabilities = targets_for(x, "probabilities")
    weight = class_weights(C, torch.float32, device)
    one, row = torch.ones(N, device=device), torch.zeros(N, device=device)
    divergences = [(0.0, 1.0, 0.0), (0.3, 0.7, 5.0), (1.0, 0.7, 0.0)]
    local = torch.ops.partita.divergence(x, x.flip(0), *divergences[1], BACKEND)
    ids = torch.tensor([[0, 1, 0]], device=device).expand(N, -1).contiguous()
    of_ids = [(x, ids, 0.7, 5.0, ignored, rest) for ignored, rest in ((-100, False), (1, True))]
    picked = [torch.ops.partita.logprobs(*a, BACKEND) for a in of_ids]
    numbers, all_numbers = (-100, 0.0, 0.0), (-100, 0.1, 5.0)
    loss_arguments = [
        (x, labels, None, *numbers),
        (x, labels, weight, *all_numbers),
        (images, pixels, None, *numbers),
        (x, probabilities, weight, *all_numbers),
    ]
    reduced = [(mean, dtype) for mean in (False, True) for dtype in (torch.float32, torch.float64)]
    return {
        **chain_samples(device),
        **linear_chain_samples(device),
        **semi_markov_samples(device),
        **ctc_samples(device),
        **crf_samples(device),
        **rnnt_samples(device),
        **linear_samples(device),
        **parallel_samples(device),
        "softmax": [
            (x, 1, False, torch.float32),
            (images, 2, True, torch.float32),
            (half, 0, False, torch.float32),
            (x[:0], 1, False, torch.float32),
        ],
        "softmax_backward": [
            (x, x.softmax(1), 1, False, torch.float32),
            (images, images, 2, True, torch.float16),
        ],
        "logsumexp": [
            (x, x.dtype),
            (half, torch.float32),
            (images.movedim(1, -1), images.dtype),
            (x[:, :0], x.dtype),
        ],
        "logsumexp_backward": [(one, x, x.amax(1), (x - x.amax(1, keepdim=True)).exp().sum(1))],
        "cross_entropy": loss_arguments,
        "cross_entropy_reduced": [(*a, *r) for a in loss_arguments for r in reduced],
        "cross_entropy_one_pass": [
            (*a[:3], items, *a[3:], 1e-3, *r)
            for a in loss_arguments
            for r, items in (
                *((r, None) for r in reduced),
                (reduced[0], torch.tensor(7, device=device)),
            )
        ],
        "cross_entropy_one_pass_": [
            (*a[:3], items, *a[3:], 1e-3, *reduced[0])
            for a in loss_arguments
            for items in (None, torch.tensor(7.0, device=device))
        ],
        "scale_": [(x, torch.tensor(2.0, device=device)), (half, torch.tensor(2.0, device=device))],
        "token_stats": [
            (x, labels, 1.0, 0.0, -100),
            (x, None, 0.7, 2.0, -100),
            (images, images[..., 0].argmax(-1).new_zeros(N, C, 2), 0.7, 0.0, 0),
        ],
        "divergence": [(x, x.flip(0), *n) for n in divergences],
        "divergence_backward": [
            (one, x, x.flip(0), *torch.ops.partita.divergence(x, x.flip(0), *n, BACKEND)[1:], *n)
            for n in divergences
        ],
        "divergence_one_pass": [
            (x, x.flip(0), factor, 0.5, *n) for n in divergences for factor in (None, one)
        ],
        "divergence_state": [(x, x.flip(0), *n) for n in divergences],
        "divergence_mixture": [(x, x.flip(0), *local[2:], *divergences[1])],
        "divergence_local_gradient": [(one, x, x.flip(0), *local[1:], *n) for n in divergences],
        "logprobs": of_ids,
        "logprobs_backward": [
            (found[0], x, ids, *found[1:], *a[2:5]) for found, a in zip(picked, of_ids, strict=True)
        ],
        "topk_logprobs": [(x, 3, 1.0, 0.0), (half, 1, 0.7, 5.0)],
        "token_stats_backward": [(one, one, one, x, labels, *partial(x, labels), 1.0, 0.0, -100)],
        **{
            name: [(one, row, *a[:3], *statistics(a), *a[3:]) for a in loss_arguments[:2]]
            for name in ("cross_entropy_backward", "cross_entropy_backward_")
        },
    }


def linear_samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return arguments without and with all options.

    The number of classes is such that saved logits have no padding.
    """
    hidden, matrix = sample_rows(N, 5, device=device), sample_rows(16, 5, device=device)
    labels, bias, weight = (
        torch.arange(N, device=device),
        torch.ones(16, device=device),
        class_weights(16, torch.float32, device),
    )
    items = torch.tensor(7, device=device)
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for bias_or_none, numbers, wanted in (
        (None, (0.0, 0.0, 0.0), (True, True, False)),
        (bias, (0.1, 5.0, 1e-3), (True, False, True)),
    ):
        class_weight = weight if numbers[0] else None
        inputs = (hidden, matrix, bias_or_none, labels, class_weight)
        options = class_weight is not None
        fields = torch.ops.partita.linear_rows(
            *inputs, 0.7 if options else 1.0, numbers[1], -100, options, options, 3, False, BACKEND
        )
        row, optional = (
            torch.linspace(0, 1, N, device=device),
            torch.ones(N, device=device) if options else None,
        )
        found["linear_rows"] += [
            (*inputs, 1.0, numbers[1], -100, options, options, chunk, save_logits)
            for chunk, save_logits in ((3, False), (16, True))
        ]
        statistics = (fields[5], fields[6], hidden.new_empty(0))
        found["linear_rows_backward"].append(
            (row, -row, optional, optional, *inputs, *statistics, 1.0, numbers[1], 3, *wanted)
        )
        found["linear_one_pass"] += [
            (*inputs, denominator, -100, *numbers, mean, chunk, *wanted)
            for denominator, mean, chunk in ((None, False, N), (None, True, 2), (items, False, 2))
        ]
        if bias_or_none is None:  # packed rows have none, and are in bf16
            packed = (
                sample_rows(N, 16, device=device).bfloat16(),
                matrix.new_ones(16, 16).bfloat16(),
            )
            found["linear_packed_one_pass"] += [
                (*packed, *inputs[2:], None, -100, *numbers, True, chunk, *wanted)
                for chunk in (N, 2)
            ]
        ids = torch.tensor([[0, 1, 0, -100]], device=device).expand(N, -1).contiguous()
        of_ids = (hidden, matrix, bias_or_none, ids)
        found["linear_logprobs"] += [
            (*of_ids, 0.7, numbers[1], -100, rest, chunk, save)
            for rest, chunk, save in ((False, 3, False), (True, 16, True))
        ]
        found["linear_topk_logprobs"] += [
            (hidden, matrix, bias_or_none, 2, 0.7, numbers[1], 3, save) for save in (False, True)
        ]
        for rest in (False, True):
            options = (0.7, numbers[1], -100)
            picked = torch.ops.partita.linear_logprobs(*of_ids, *options, rest, 3, False, BACKEND)
            arguments = (picked[0], *of_ids, *picked[1:], *options, 3, *wanted)
            found["linear_logprobs_backward"].append(arguments)
    for bias_or_none, numbers, wanted in (
        (None, (0.0, 1.0, 0.0), (True, True, False)),
        (bias, (0.3, 0.7, 5.0), (True, False, True)),
    ):
        heads = (hidden, matrix, bias_or_none, hidden[:, :2], matrix[:, :2].contiguous(), None)
        found["linear_divergence"] += [(*heads, *numbers, 3, save) for save in (False, True)]
        *fields, _, _ = torch.ops.partita.linear_divergence(*heads, *numbers, 3, False, BACKEND)
        statistics = (*fields[1:], hidden.new_empty(0), hidden.new_empty(0))
        found["linear_divergence_backward"].append((row, *heads, *statistics, *numbers, 3, *wanted))
        found["linear_divergence_one_pass"] += [
            (*heads, row, *numbers, *sizes, *wanted) for sizes in ((3, 0, 0), (2, 9, 4))
        ]
    return found


def parallel_samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return arguments of the first of two ranks: plain, with a smoothing loss, with an entropy."""
    hidden, matrix = sample_rows(N, 5, device=device), sample_rows(16, 5, device=device)
    logits, labels, weight = (
        hidden @ matrix.T,
        torch.arange(N, device=device),
        class_weights(16, torch.float32, device),
    )
    row = torch.linspace(0.1, 1, N, device=device)
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for class_weight, smoothing, entropy in (
        (None, False, False),
        (weight, True, False),
        (None, False, True),
    ):
        state = (labels, class_weight, 0, 0.7 if entropy else 1.0, 0.0, smoothing, entropy)
        words = torch.ops.partita.parallel_logits(logits, *state, BACKEND)
        gathered = torch.stack([words, words])
        numbers = (labels, 32, 0, 0, state[3], -100, smoothing, entropy)
        fields = torch.ops.partita.parallel_fields(gathered, *numbers, BACKEND)
        found["parallel_logits"].append((logits, *state))
        found["parallel_linear"] += [
            (hidden, matrix, None, *state, chunk, save_logits)
            for chunk, save_logits in ((3, False), (16, True))
        ]
        found["parallel_fields"].append((gathered, *numbers))
        grads = (row, None, row if smoothing else None, row if entropy else None)
        all_weights = None if class_weight is None else torch.cat([weight, weight])
        found["parallel_coefficients"].append(
            (labels, *grads, all_weights, fields[3], smoothing, 32, state[3], -100)
        )
        coefficients = (row, -row, row if entropy else None, row if smoothing else None)
        rest = (labels, class_weight, *fields[5:7], state[3], 0.0)
        found["parallel_gradient"].append((*coefficients, logits, *rest))
        found["parallel_gradient_"].append((logits, *coefficients, *rest))
    return found


def chain_samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return arguments for small tables and for tables with many edges into a state."""
    small = random_chain(
        4, 2, 3, 2, ragged=False, forbidden=0.0, device=device, dtype=torch.float32
    )
    dense = random_chain(3, 2, 12, kind="dense", ragged=False, device=device)
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for chain, lengths in ((small, torch.full((2,), 4, device=device)), (dense, None)):
        inputs = (chain.scores, chain.source, chain.initial, chain.final, lengths)
        scores, source, initial, final, _ = inputs
        logz, saved = torch.ops.partita.chain_logz(*inputs, True, BACKEND)
        values = (scores[:1].nan_to_num(neginf=0.0).expand_as(scores), initial, final)
        mean, total, pairs = torch.ops.partita.chain_expectation(*inputs, *values, True, BACKEND)
        uniforms = torch.linspace(
            0, 1, len(scores) * 6 + 6, device=device, dtype=torch.float64
        ).reshape(-1, 3, 2)
        ones = torch.ones_like(logz)
        found["chain_logz"] += [(*inputs, save) for save in (False, True)]
        found["chain_rounded_logz"] += [(*inputs, save) for save in (False, True)]
        found["chain_gradient"].append(
            (ones, scores, initial, final, source, lengths, logz, saved, scores.dtype)
        )
        found["chain_scan"] += [
            (*inputs, best, reverse) for best in (False, True) for reverse in (False, True)
        ]
        found["chain_viterbi"] += [(*inputs, trace) for trace in (False, True)]
        found["chain_sample"].append((*inputs, uniforms))
        found["chain_expectation"] += [(*inputs, *values, save) for save in (False, True)]
        found["chain_expectation_gradient"] += [
            (ones, *inputs, *values, mean, total, pairs, *of)
            for of in ((True, True), (True, False), (False, True))
        ]
    return found


def linear_chain_samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return arguments for transitions of every kind, with and without ends and lengths."""
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for kind, ends in (("constant", True), ("by token", False), ("by sequence", True)):
        chain = random_linear_chain(
            4, 2, 3, kind=kind, ragged=False, ends=ends, dtype=torch.float32, device=device
        )
        lengths = torch.tensor([4, 2], device=device) if ends else None
        scores = (chain.emissions, chain.transitions, chain.start, chain.end)
        inputs = (*scores, lengths)
        logz, _, saved = torch.ops.partita.linear_chain_logz(*inputs, True, BACKEND)
        ones, uniforms = torch.ones_like(logz), torch.full((4, 3, 2), 0.5, device=device).double()
        found["linear_chain_logz"] += [(*inputs, save) for save in (False, True)]
        found["linear_chain_gradient"] += [
            (ones, *inputs, logz, saved, *of)
            for of in ((True, False), (True, True), (False, False))
        ]
        found["linear_chain_viterbi"].append(inputs)
        found["linear_chain_sample"].append((*inputs, uniforms))
        values = (None if t is None else torch.ones_like(t) for t in scores)
        found["linear_chain_tangent"].append((ones, *inputs, *values))
    return found


def semi_markov_samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return arguments of small chains, without and with lengths.

    All steps are valid, because the scans do not write the states after the last one.
    """
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for lengths in (None, torch.tensor([3, 3], device=device)):
        chain = random_semi_markov(3, 2, 2, 2, ragged=False, dtype=torch.float32, device=device)
        scores = (chain.emissions, chain.transitions, chain.durations, chain.start, chain.end)
        inputs = (*scores, lengths)
        logz, _, saved = torch.ops.partita.semi_markov_logz(*inputs, True, BACKEND)
        uniforms = torch.full((3, 2, 3, 2), 0.5, dtype=torch.float64, device=device)
        found["semi_markov_logz"] += [(*inputs, save) for save in (False, True)]
        found["semi_markov_gradient"] += [
            (torch.ones_like(logz), *inputs, logz, saved, per_sequence)
            for per_sequence in (False, True)
        ]
        found["semi_markov_segments"].append((*inputs, logz, saved))
        found["semi_markov_viterbi"].append(inputs)
        found["semi_markov_sample"].append((*inputs, uniforms))
    return found


def ctc_samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return log-probabilities and logits, with targets of several lengths."""
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    logits = torch.linspace(-1, 1, 48, device=device).reshape(6, 2, 4)
    labels, *rest = (
        torch.tensor(numbers, device=device) for numbers in ([1, 2, 2, 3], [0, 1], [6, 5], [1, 3])
    )
    for from_logits in (False, True):
        inputs, reduction = (logits, labels, *rest), "mean" if from_logits else "none"
        scores = (logits[0, 0], 0.5, 4) if from_logits else (None, 1.0, None)
        loss, losses, saved = torch.ops.partita.ctc_loss(
            *inputs, 3, 0, from_logits, reduction, False, True, *scores, BACKEND
        )
        found["ctc_loss"] += [
            (*inputs, 3, 0, from_logits, reduction, True, save, *scores) for save in (False, True)
        ]
        found["ctc_gradient"].append(
            (
                *(torch.ones_like(loss), *inputs, losses, saved, scores[0]),
                *(3, 0, from_logits, reduction, *scores[1:]),
            )
        )
        found["ctc_align"].append((*inputs, 3, 0, from_logits, *scores))
        searched = (logits, rest[1], 0)
        found["ctc_greedy_search"].append((*searched, from_logits))
        found["ctc_beam_search"].append((*searched, 3, 2, 3, 0.9 * from_logits, from_logits))
    return found


def crf_samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return scores over three bases, with padded and with concatenated targets.

    All steps are valid, because the scans do not write the states after the last one.
    """
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    scores = torch.linspace(-1, 1, 96, device=device).reshape(4, 2, 3, 4)
    source = partita.debruijn_source(3, 1, device=device)
    lattice_source = torch.tensor([[0, -1], [1, 0], [2, 1]], device=device)
    targets, lengths, steps = (
        torch.tensor(numbers, device=device) for numbers in ([[1, 2, 2], [3, 3, 1]], [3, 2], [4, 4])
    )
    for padded in (True, False):
        labels = targets if padded else targets.flatten()[:5].int()
        inputs = (scores if padded else scores.flatten(2), source, lattice_source, labels, lengths)
        found["ctc_crf_path"] += [(scores, source, steps, width) for width in (0, 4)]
        found["ctc_crf_base_posteriors"].append((scores.softmax(-1), steps))
        path = torch.zeros(5, 2, dtype=torch.int64, device=device)
        by_base, first = scores[:, :, 0, :3].double().exp(), scores[0, :, :, 0].double().exp()
        found["ctc_crf_calls"].append((by_base, first, path, path[1:], steps, 1, torch.float32))
        reduction, steps_or_none = ("none", steps) if padded else ("mean", None)
        options = (steps_or_none, 1, reduction)
        value, *results = torch.ops.partita.crf_loss(*inputs, *options, True, BACKEND)
        found["crf_loss"] += [(*inputs, *options, save) for save in (False, True)]
        found["crf_gradient"].append(
            (torch.ones_like(value), *inputs[:2], lengths, *results, reduction)
        )
    return found


def rnnt_samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return batches without padding, as log-sum-exps and posteriors of padding are not written."""
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    logits = torch.linspace(-1, 1, 72, device=device).reshape(2, 3, 3, 4)
    durations = logits[..., :2] * 2
    sequences = tuple(
        torch.tensor(numbers, device=device) for numbers in ([[1, 2], [3, 3]], [3, 3], [2, 2])
    )
    grad, ops = torch.tensor([1.0, -0.5], device=device), torch.ops.partita
    for fused, hat in ((True, False), (True, True), (False, False)):
        options = (0, fused, hat)
        _, *saved = ops.rnnt_forward(logits, *sequences, *options, 0.1, True, BACKEND)
        found["rnnt_forward"].append((logits, *sequences, *options, 0.1, not hat))
        nodes = (grad, logits, *saved, *sequences, *options)
        found["rnnt_gradient"].append((*nodes, 0.5 * hat, 0.1 * fused))
        found["rnnt_gradient_"].append((*nodes, 0.0, 0.0))
    found["rnnt_align"] += [(logits, *sequences, 0, fused) for fused in (True, False)]
    inputs = (logits, durations, *sequences, 0, [0, 1], 0.1)
    _, *saved = ops.tdt_forward(*inputs, True, BACKEND)
    found["tdt_forward"] += [(*inputs, needed) for needed in (True, False)]
    found["tdt_gradient"].append((grad, logits, durations, *saved, *sequences, 0))
    found["tdt_align"].append(inputs)
    joint = (logits[:, :, 0], logits[:, 1], logits[0, 0] + 0.1)
    bias, weight = torch.ones(3, device=device), logits[1, :2, 0] * 2
    targets = (sequences[0] % 3).clamp(min=1)
    for factor, keep_logits, wanted in ((grad, True, True), (None, False, False)):
        options = (targets, *sequences[1:], factor, "tanh", 0)
        chunks = (2, keep_logits, True, wanted)
        found["linear_rnnt"].append((*joint, bias, *options, True, 0.1, 0.2, *chunks, True, wanted))
        heads = (*joint, None, weight, None)
        found["linear_tdt"].append(
            (*heads, *options, [0, 1], 0.1, *chunks, True, False, wanted, False)
        )
    return found


def statistics(arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that the backward pass gets from the forward pass."""
    return torch.ops.partita.cross_entropy(*arguments, BACKEND)[2:]


def partial(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    entropy, _, maximum, sumexp = torch.ops.partita.token_stats(x, labels, 1.0, 0.0, -100, BACKEND)[
        2:
    ]
    return maximum, sumexp, entropy


OPS = sorted(
    name.removeprefix("partita::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("partita::")
)


def test_every_op_has_samples() -> None:
    assert partita.softmax is not None
    assert sorted(samples("cpu")) == OPS


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str, device: str) -> None:
    op = getattr(torch.ops.partita, name).default
    on_kernels = device == "cuda" or BACKEND == "triton"
    # The interpreter takes minutes, so it sees a third of the samples.
    for arguments in samples(device)[name][:: 3 if INTERPRETING else 1]:
        # These save memory that they fill in part, so two runs need not agree in it.
        scratch = name == "linear_chain_logz" or (name == "ctc_loss" and on_kernels)
        utilities = [
            *("test_schema", "test_autograd_registration", "test_faketensor"),
            *["test_aot_dispatch_dynamic"] * (not scratch and not INTERPRETING),
        ]
        torch.library.opcheck(op, (*arguments, BACKEND), test_utils=utilities)
