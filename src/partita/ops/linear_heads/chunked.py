"""Losses from hidden states, one chunk of logits at a time.

A chunk holds the logits of some tokens for all classes, or those of all tokens for some classes.
The full `[M, C]` logits need not exist at once. The loops and the matrix products are the same for
every loss and device. Between the products of a chunk a loss reads its logits and overwrites them
with their gradient; a backend supplies the functions that do this as `HeadKernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import chunks, part_of
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.common import LossOptions
from ..divergence.common import (
    DivergenceKernels,
    DivergenceRows,
    DivergenceState,
    TermOptions,
    counts,
    empty_rows,
    empty_state,
)
from ..logprobs.common import (
    EntryKernels,
    new_rest,
    other_classes,
    topk_fake,
    with_ids,
    with_rest,
)
from ..truncated.common import (
    Rules,
    TruncatedGrads,
    TruncatedKernels,
    TruncatedSums,
    truncated_fake,
)
from .common import (
    GradientCoefficients,
    Head,
    HeadGradients,
    LowRankGradients,
    RowOptions,
    RowState,
    RowStatistics,
    Wanted,
    accumulate_hidden,
    counted_states,
    never,
    new_state,
    read_logits,
)
from .plan import CPU_CHUNK_TOKENS, FP16_FACTOR, FP16_SCALE, MIN_CHUNK_TOKENS, padded_width
from .products import multiply, multiply_blocks

Buffers = tuple[Tensor, Tensor]  # memory of the logits of student and teacher


def gradients_like(
    head: Head, wanted: Wanted, adds_ranks: bool = False, dtype: torch.dtype | None = None
) -> HeadGradients:
    """Return memory for gradients in the dtypes of the head's tensors, or in another one.

    Those of the hidden states and of the factor beside them are in the accumulator's dtype where
    ranks add them up. Gradients that are not wanted are empty.
    """
    like = [head.input if each is None else each for each in head.tensors]
    dtypes = [dtype or x.dtype for x in like]
    if adds_ranks:
        dtypes[0] = dtypes[3] = acc_dtype(head.input.dtype)
    return HeadGradients(
        *(
            x.new_empty(x.shape if wants else (0,), dtype=of_x)
            for x, wants, of_x in zip(like, wanted, dtypes, strict=True)
        )
    )


def logits_of(
    heads: Sequence[Head], buffers: Sequence[Tensor], tokens: slice, classes: slice
) -> list[Tensor]:
    """Compute the logits of some tokens and classes under each head, in its buffer."""
    pairs = zip(heads, buffers, strict=True)
    return [head.part(tokens, classes).logits(buffer) for head, buffer in pairs]


def head_gradients(
    heads: Sequence[Head],  # the heads whose logits the loss reads
    wanted: Wanted,
    counts: Callable[[slice], Tensor],  # returns which rows of some tokens have a gradient
    # Takes tokens and the classes of a chunk, memory for the gradient of the first head's logits,
    # which may be their own, and the logits of each head.
    write_gradient: Callable[..., None],
    # tokens, chunk: the tokens and the classes in a chunk. One of them is the number of all, but in
    # the batch-invariant mode.
    tokens: int,
    chunk: int,
    # The saved logits of each head, for all tokens and some of the last classes, or none. They are
    # used first, and their memory serves the other chunks.
    saved: Sequence[Tensor] = (),
    # dtype, adds_ranks: as in `gradients_like`
    dtype: torch.dtype | None = None,
    adds_ranks: bool = False,
    *,
    of_low_rank: Callable[..., bool] = never,  # `HeadKernels.low_rank_gradients`
) -> HeadGradients:
    """Compute the gradients of the first head, one chunk of logits after another."""
    head, (input_grad, weight_grad, bias_grad, *_) = heads[0], wanted
    (M, _), C, accumulator = head.input.shape, len(head.weight), acc_dtype(head.input.dtype)
    buffers, heads = list(saved), [each.rounded for each in heads]
    saved_classes = min(len(buffers[0]) // head.buffer_rows(max(M, 1)), C) if buffers else 0
    parts = [slice(C - saved_classes, C)] * (saved_classes > 0)
    parts += chunks(C - saved_classes, chunk)
    if not saved_classes:
        sizes = min(tokens, M), min(chunk, C)
        buffers = [each.buffer(*sizes, for_gradient=each is heads[0]) for each in heads]
    rounds_sum = tokens < M and (dtype or head.weight.dtype) != accumulator
    one_part = len(parts) == 1
    fits = Wanted(*wanted)._replace(weight_grad=weight_grad and not rounds_sum)
    result, of_weight = gradients_like(head, fits, adds_ranks, dtype), head.weight.dtype
    (dinput, dweight, dbias, *_), head = result, heads[0]
    low_rank = LowRankGradients(head, Wanted(*wanted), of_low_rank)
    if input_grad and not one_part:
        if dinput.dtype != accumulator:
            dinput = torch.empty_like(dinput, dtype=accumulator)
        dinput.zero_()
    if rounds_sum:
        dbias = torch.empty_like(dbias, dtype=accumulator)
        dweight = torch.empty_like(head.weight if weight_grad else dweight, dtype=accumulator)
    if M == 0:
        dweight.zero_()
        dbias.zero_()
    for rows in chunks(M, tokens):
        states = head.input[rows]
        if weight_grad:
            is_free = one_part or dinput is not result.input
            memory = result.input[rows] if is_free else states[:0]
            states = counted_states(states, counts(rows), memory)
        low_rank.start(rows, counts)
        for part in parts:
            sizes, is_first = (len(states), part.stop - part.start), rows.start == 0
            padded = head.rows_in(buffers[0].view(head.input.dtype), *sizes)
            dlogits = padded[: sizes[0], : sizes[1]]
            in_place = saved_classes > 0 and part.stop == C
            if not in_place and head.is_read_in_place(sizes[0]):
                logits_of(heads, buffers, rows, part)
                in_place = True
            for some in head.parts_to_read(sizes[0], in_place):
                those = slice(rows.start + some.start, rows.start + some.stop)
                if in_place:
                    logits = [head.rows_in(each, *sizes)[some, : sizes[1]] for each in buffers]
                    if head.widens and some.start == 0:
                        logits[0] = logits[0].clone()  # the only one that its gradient overlaps
                else:
                    offset = padded.numel() // 2 if head.widens else 0
                    logits = logits_of(heads, [buffers[0][offset:], *buffers[1:]], those, part)
                write_gradient(those, part, dlogits[some], *logits)
            if head.widens and padded.device.type == "cpu":
                padded[:, sizes[1] :].zero_()  # as in `Head.logits`
            if weight_grad:
                multiply(dlogits.T, states, dweight[part], adds=not is_first)
            if input_grad:
                factors = padded[:, : sizes[1]], head.weight[part]
                multiply_blocks(*factors, dinput[rows], head.invariant, adds=not one_part)
            if bias_grad:
                sums = dlogits.sum(0, dtype=accumulator)
                dbias[part] = sums if is_first else dbias[part] + sums
            low_rank.add(padded, rows, part)
            del logits, dlogits, padded
    low_rank.write(result)
    if dinput is not result.input:
        result.input.copy_(dinput)
    if rounds_sum:
        result.bias.copy_(dbias)
        buffers.clear()  # the rounded gradient takes their memory
        result = result._replace(weight=dweight.to(of_weight))
    return result


def tokens_at_once(head: Head, chunk: int) -> int:
    """Return the tokens in a chunk, fewer on a CPU that adds up the matrix's gradient in place."""
    (input, *_), in_place = head, not head.invariant
    in_place = in_place and not input.is_cuda and input.dtype == acc_dtype(input.dtype)
    return min(chunk, CPU_CHUNK_TOKENS) if in_place else chunk


def tokens_of_backward(head: Head, saved: Tensor) -> int:
    """Return the tokens in a chunk of a backward pass: all, unless blocks are computed again."""
    return MIN_CHUNK_TOKENS if head.invariant and not saved.numel() else len(head.input)


class HeadKernels(NamedTuple):
    """The functions of one backend that work on a chunk of logits; the methods are its ops."""

    # Updates a `RowState` in place with the classes of a chunk. The first chunk overwrites it.
    accumulate_logits: Callable[..., None]
    # Returns the `RowStatistics` of a `RowState` that has seen all classes.
    row_statistics: Callable[..., RowStatistics]
    logits_gradient: Callable[..., None]  # writes the gradient of a chunk's logits
    one_pass: Callable[..., Tensor]  # returns a chunk's loss and writes the gradient of its logits
    # Returns what the loss and the z-loss of a row are divided by in a mean, or in a sum with a
    # denominator.
    mean_shares: Callable[..., Tensor | None]
    of_ids: EntryKernels  # the functions for the logits of given classes
    topk_of_rows: Callable[..., None]  # writes the `TopKRows` of a chunk
    truncated: TruncatedKernels  # the functions for the classes that a sampler keeps
    divergence: DivergenceKernels  # the functions for the logits of two heads
    # Adds the gradients of both factors of low rank; returns False where two products do, and else
    # overwrites the gradient of the logits.
    low_rank_gradients: Callable[..., bool] = never
    # Takes the place of `head_gradients` for packed rows, or None.
    packed_gradients: Callable[..., HeadGradients] | None = None

    def gradients(self, *args: Any, **options: Any) -> HeadGradients:
        """Return `head_gradients` by this backend."""
        return head_gradients(*args, **options, of_low_rank=self.low_rank_gradients)

    def linear_rows(
        self,
        head: Head,
        target: Tensor | None,
        class_weight: Tensor | None,
        options: RowOptions,
        chunk: int,
        save_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the `RowStatistics` of a head, and its logits if they are saved.

        Without a target, which needs the entropy too, the label of a row is its arg-max.
        """
        no_class = target
        if no_class is None:
            no_class = head.input.new_full((len(head.input),), -1, dtype=torch.int64)
        state = new_state(head.input, options.needs_smoothing, options.needs_entropy)
        rest = (class_weight, state, *options[:2], chunk, save_logits)
        saved = accumulate_hidden(self.accumulate_logits, head, no_class, *rest)
        labels = no_class.contiguous()
        if target is None:
            assert state.argmax is not None
            labels = state.argmax
            state = state._replace(label=state.maximum)
        numbers = (len(head.weight), options.temperature, options.ignore_index)
        statistics = self.row_statistics(state, labels, class_weight, *numbers)
        return *statistics, saved

    def linear_rows_backward(
        self,
        coefficients: GradientCoefficients,
        head: Head,
        target: Tensor,
        class_weight: Tensor | None,
        maximum: Tensor,
        sumexp: Tensor,
        saved: Tensor,
        temperature: float,
        softcap: float,
        adds_ranks: bool,
        chunk: int,
        wanted: Wanted,
    ) -> HeadGradients:
        """Compute the `HeadGradients` from the coefficients of the rows.

        Saved logits are overwritten with their gradient. An empty `saved` means that they were not
        saved; they are then computed again, `chunk` classes at a time. With `adds_ranks` the
        gradient of the hidden states is one rank's part, which is not rounded.
        """
        target, tokens = target.contiguous(), tokens_of_backward(head, saved)

        def write_gradient(rows: slice, part: slice, result: Tensor, logits: Tensor) -> None:
            row_factors = (target[rows], part_of(class_weight, part), part_of(coefficients, rows))
            options = (maximum[rows], sumexp[rows], temperature, softcap)
            self.logits_gradient(logits, part.start, *row_factors, *options, result)

        def counts(rows: slice) -> Tensor:
            return part_of(coefficients, rows).counts()

        rest = (counts, write_gradient, tokens, chunk, [saved])
        return self.gradients([head], wanted, *rest, adds_ranks=adds_ranks)

    def linear_one_pass(
        self,
        head: Head,
        target: Tensor,
        class_weight: Tensor | None,
        denominator: Tensor | None,
        options: LossOptions,
        chunk: int,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute the sum or mean of the loss and its `HeadGradients`, `chunk` tokens at a time.

        Each chunk takes three matrix products: its logits, and two from their gradient. A
        denominator, `[]`, divides a sum before the gradients are rounded.
        """
        (input, weight, *_), ignore_index = head, options.ignore_index
        dtype, mean, loss = acc_dtype(input.dtype), options.reduction == "mean", None
        is_fp16 = input.dtype == torch.float16
        if is_fp16 and not mean and denominator is None:
            denominator = input.new_ones((), dtype=dtype)
        divides = (denominator, ignore_index, len(weight), mean, dtype)
        divisors = self.mean_shares(target, class_weight, *divides)
        if is_fp16 and divisors is not None:
            divisors = divisors / FP16_SCALE
        mean = mean or denominator is not None
        of_chunk = options._replace(reduction="mean" if mean else "sum")

        def write_gradient(labels: Tensor, result: Tensor, logits: Tensor) -> None:
            nonlocal loss
            of_part = self.one_pass(logits, labels, class_weight, of_chunk, divisors, result)
            loss = of_part if loss is None else loss + of_part

        if self.packed_gradients is not None:
            gradients = self.packed_gradients(
                head, wanted, target, ignore_index, write_gradient, chunk
            )
        else:
            gradients = self.gradients(
                [head],
                wanted,
                lambda rows: target[rows] != ignore_index,
                lambda rows, _, *memory: write_gradient(target[rows], *memory),
                tokens_at_once(head, chunk),
                len(weight),
                dtype=dtype if is_fp16 else None,
            )
        if loss is None:
            loss = torch.full((), torch.nan if mean else 0.0, dtype=dtype, device=input.device)
        if is_fp16:
            for each in (loss, *gradients):
                each /= FP16_SCALE
        return loss, *gradients

    def linear_logprobs(
        self,
        head: Head,
        ids: Tensor,
        temperature: float,
        softcap: float,
        ignore_index: int,
        needs_rest: bool,
        chunk: int,
        save_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the fields of `LogprobRows`, and the saved logits.

        The last result is empty if the logits are not saved.
        """
        input, C = head.input, len(head.weight)
        no_class = torch.full((len(input),), -1, dtype=torch.int64, device=input.device)
        rest = new_rest(input, [len(input)])
        needs_smoothing, needs_entropy = False, temperature != 1.0  # which the kernel's sums need
        state = new_state(input, needs_smoothing, needs_entropy)
        # The fields of a row's label and origin hold the logits of all ids and the statistics of
        # the rest, so that the loop cuts them into chunks too.
        state = state._replace(label=state.label.new_zeros(ids.shape), origin=rest)

        def accumulate(
            logits: Tensor, first: int, ids: Tensor, _: Any, state: RowState, *options: float
        ) -> None:
            self.of_ids.gather(logits, first, C, ids, state.label, softcap, ignore_index)
            if needs_rest:
                self.of_ids.accumulate_rest(logits, first, ids, state.origin, *options)
                return
            rows = len(logits)
            unused = state._replace(label=torch.empty_like(state.maximum), origin=None)
            self.accumulate_logits(logits, first, no_class[:rows], None, unused, *options)

        numbers = (temperature, softcap, chunk, save_logits)
        saved = accumulate_hidden(accumulate, head, ids, None, state, *numbers)
        of_rows, of_ids_too = (state.maximum, state.sumexp), (C, temperature, ignore_index)
        if needs_rest:
            of_rows = with_ids(rest, state.label, ids, *of_ids_too)
        found = self.of_ids.finish(state.label, ids.contiguous(), *of_rows, *of_ids_too)
        if needs_rest:
            found = with_rest(found, rest, *of_rows, temperature)
        return found, state.label, *of_rows, rest if needs_rest else rest[:, :0].clone(), saved

    def linear_logprobs_backward(
        self,
        grad: Tensor,
        head: Head,
        ids: Tensor,
        entries: Tensor,
        maximum: Tensor,
        sumexp: Tensor,
        rest: Tensor,
        saved: Tensor,
        temperature: float,
        softcap: float,
        ignore_index: int,
        chunk: int,
        wanted: Wanted,
    ) -> HeadGradients:
        """Compute the `HeadGradients` from the gradient of the log-probabilities."""
        C, K, ids = len(head.weight), ids.shape[1], ids.contiguous()
        on_ids, on_rest = grad[:, :K].contiguous(), grad[:, K:]
        entries, maximum, sumexp = entries.contiguous(), maximum.contiguous(), sumexp.contiguous()
        totals, labels = self.of_ids.totals(on_ids, ids, C, ignore_index)
        if rest.shape[1]:
            totals = totals + on_rest[:, 0]
        others = other_classes(grad, totals, maximum, sumexp, rest, temperature)
        counts = ((on_ids != 0) & (ids != ignore_index)).any(1) | (on_rest != 0).any(1)
        coefficients = GradientCoefficients(
            others.factor / temperature, torch.zeros_like(others.factor), None, None
        )
        labels, of_entries = labels.contiguous(), (on_ids, ids, totals, entries, maximum, sumexp)
        numbers, sizes = (temperature, softcap), (tokens_of_backward(head, saved), chunk)

        def write_gradient(rows: slice, part: slice, result: Tensor, logits: Tensor) -> None:
            row_factors = (labels[rows], None, part_of(coefficients, rows))
            of_others = (others.maximum[rows], others.sumexp[rows], *numbers)
            self.logits_gradient(logits, part.start, *row_factors, *of_others, result)
            parts = (each[rows] for each in of_entries)
            self.of_ids.write(result, part.start, C, *parts, *numbers, ignore_index)

        of_rows = (lambda rows: counts[rows], write_gradient)
        return self.gradients([head], wanted, *of_rows, *sizes, [saved])

    def linear_topk_logprobs(
        self,
        head: Head,
        k: int,
        temperature: float,
        softcap: float,
        tokens: int,
        save_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the `TopKRows` of a head, and what `read_logits` returns."""
        found = topk_fake(head.input, k)

        def read(rows: slice, _: slice, logits: Tensor) -> None:
            self.topk_of_rows(logits, k, temperature, softcap, part_of(found, rows))

        return *found, read_logits(head, tokens, len(head.weight), save_logits, read)

    def linear_truncated_stats(
        self,
        head: Head,
        target: Tensor | None,
        rules: Rules,
        softcap: float,
        ignore_index: int,
        tokens: int,
        save_logits: bool,
    ) -> tuple[Tensor, ...]:
        """Return the `TruncatedRows` of a head, and what `read_logits` returns."""
        found = truncated_fake(head.input)

        def read(rows: slice, _: slice, logits: Tensor) -> None:
            labels, of_rows = part_of(target, rows), part_of(rules, rows)
            part = part_of(found, rows)
            self.truncated.of_rows(logits, labels, of_rows, softcap, ignore_index, part)

        return *found, read_logits(head, tokens, len(head.weight), save_logits, read)

    def linear_truncated_stats_backward(
        self,
        grads: TruncatedGrads,
        head: Head,
        rows: TruncatedSums,
        saved: Tensor,
        keeps_target: bool,
        softcap: float,
        ignore_index: int,
        chunk: int,
        wanted: Wanted,
    ) -> HeadGradients:
        """Compute the `HeadGradients` from the gradients of the statistics."""
        grads = grads.counted(rows, keeps_target, ignore_index)
        counts = grads.counts()
        options = (len(head.weight), keeps_target, softcap, ignore_index)

        def write_gradient(tokens: slice, part: slice, result: Tensor, logits: Tensor) -> None:
            of_rows = (part_of(grads, tokens), part_of(rows, tokens))
            self.truncated.gradient(logits, part.start, *of_rows, *options, result)

        sizes = (tokens_of_backward(head, saved), chunk)
        of_tokens = (lambda tokens: counts[tokens], write_gradient)
        return self.gradients([head], wanted, *of_tokens, *sizes, [saved])

    def accumulate_rows(
        self,
        pairs: Sequence[tuple[Any, ...]],
        target: Tensor | None,
        state: DivergenceState,
        classes: int,
        options: TermOptions,
    ) -> None:
        """Compute the terms of rows from their logits, which come in parts of the classes."""
        for first, *logits in pairs:
            self.divergence.accumulate(*logits, target, state, first, classes, options)
        if options.is_mixed:
            for first, *logits in pairs:
                self.divergence.accumulate_mixture(*logits, state, first, options)

    def accumulate_all(
        self,
        heads: tuple[Head, Head],
        target: Tensor | None,
        options: TermOptions,
        tokens: int,
        saved: int,
    ) -> tuple[DivergenceRows, Buffers]:
        """Return the terms of all rows, and the logits of the last `saved` classes."""
        heads = heads[0].rounded, heads[1]
        (M, _), C = heads[0].input.shape, len(heads[0].weight)
        found = empty_rows(heads[0].input, options)
        state = empty_state(found, options)
        of_saved = heads[0].buffer(M, saved), heads[1].buffer(M, saved)
        of_others = [head.buffer(min(tokens, M), C - saved) for head in heads]
        for rows in chunks(M, tokens):
            offset = rows.start * padded_width(saved)
            memory = [buffer[offset:] for buffer in of_saved]
            parts = ((slice(0, C - saved), of_others), (slice(C - saved, C), memory))
            pairs = [
                (part.start, *logits_of(heads, buffers, rows, part))
                for part, buffers in parts
                if part.start < part.stop
            ]
            self.accumulate_rows(pairs, part_of(target, rows), part_of(state, rows), C, options)
        return found, of_saved

    def linear_divergence(
        self,
        head: Head,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        target: Tensor | None,
        options: TermOptions,
        tokens: int,
        save_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the `DivergenceRows` of two heads, and their logits if they are saved.

        The logits of `tokens` tokens exist at once, those of all tokens if they are saved.
        """
        heads = head, head.beside(teacher_input, teacher_weight, teacher_bias)
        saved = len(head.weight) if save_logits else 0
        found, buffers = self.accumulate_all(heads, target, options, tokens, saved)
        return *found, *buffers

    def linear_divergence_backward(
        self,
        grad: Tensor,
        head: Head,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        target: Tensor | None,
        rows: DivergenceRows,
        saved: Tensor,
        teacher_saved: Tensor,
        options: TermOptions,
        chunk: int,
        wanted: Wanted,
    ) -> HeadGradients:
        """Compute the `HeadGradients` from the gradient of the packed terms of rows.

        Saved logits, those of the last classes, are overwritten. Others are computed again.
        """
        heads = head, head.beside(teacher_input, teacher_weight, teacher_bias)
        of_all = DivergenceRows(*(field.contiguous() for field in rows))
        grad, sizes = grad.contiguous(), (tokens_of_backward(head, saved), chunk)

        def write_gradient(rows: slice, part: slice, result: Tensor, *logits: Tensor) -> None:
            of_rows = (part_of(target, rows), part_of(of_all, rows))
            place = (part.start, len(head.weight), options, result)
            self.divergence.gradient(grad[rows], *logits, *of_rows, *place)

        rest = (lambda rows: counts(grad[rows]), write_gradient, *sizes)
        return self.gradients(heads, wanted, *rest, (saved, teacher_saved))

    def linear_divergence_one_pass(
        self,
        head: Head,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        target: Tensor | None,
        factors: Tensor,  # the factors of each row, packed as the terms
        options: TermOptions,
        # tokens, saved, chunk: as in `DivergencePlan`. A chunk of tokens takes four matrix
        # products: its logits under both heads, and two from the gradient.
        tokens: int,
        saved: int,
        chunk: int,
        wanted: Wanted,
    ) -> tuple[Tensor, ...]:
        """Return the `DivergenceRows`, and `HeadGradients` of the sum of terms times factors."""
        heads = head, head.beside(teacher_input, teacher_weight, teacher_bias)
        is_fp16 = head.input.dtype == torch.float16
        if is_fp16:
            largest = factors.amax() if len(factors) else factors.new_ones(())
            scale = FP16_FACTOR / largest.clamp(min=1e-30)
            factors = factors * scale
        if chunk:
            found, buffers = self.accumulate_all(heads, target, options, tokens, saved)
            tensors = (*heads[1][:3], target, found, *buffers)
            gradients = self.linear_divergence_backward(
                factors, head, *tensors, options, chunk, wanted
            )
        else:
            found = empty_rows(head.input, options)
            state, classes = empty_state(found, options), len(head.weight)

            def write_gradient(rows: slice, _: slice, result: Tensor, *logits: Tensor) -> None:
                part, labels = part_of(state, rows), part_of(target, rows)
                self.accumulate_rows([(0, *logits)], labels, part, classes, options)
                of_rows = (labels, part.rows, 0, classes, options, result)
                self.divergence.gradient(factors[rows], *logits, *of_rows)

            gradients = self.gradients(
                heads,
                wanted,
                lambda rows: counts(factors[rows]),
                write_gradient,
                tokens_at_once(head, tokens),
                len(head.weight),
                dtype=factors.dtype if is_fp16 else None,
            )
        if is_fp16:
            gradients = HeadGradients(*(each.to(scale.dtype).div_(scale) for each in gradients))
        return *found, *gradients
