"""Scores of dense linear chains and the numbers that their scans are made of.

The linear scans hold exp of the scores of states in fp64. Each step multiplies them by a power of
two. That is exact while finite transitions span at most MAX_SPAN nats and none is -inf: a state
before its emission then is at least exp(-MAX_SPAN) times the greatest one. Elsewhere the log scans
serve. The kernels of both read the range of the transitions from memory, and those that are not
meant return at once, so the host never waits.
"""

import triton
import triton.language as tl

MAX_SPAN = tl.constexpr(300.0)
LN2_FP64 = tl.constexpr(0.6931471805599453)
LOG2E_FP64 = tl.constexpr(1.4426950408889634)


@triton.jit
def transition_range(span, n, BLOCK_PARTS: tl.constexpr, MAX_PLUS: tl.constexpr = False):
    """Return whether the linear scans serve the transitions of sequence n, and the greatest one.

    With MAX_PLUS they serve all transitions, and subtract 0 from them.
    """
    if MAX_PLUS:
        return True, 0.0
    else:
        part, ptr = tl.arange(0, BLOCK_PARTS), span.ptr + n % span.sets * 2 * span.parts
        greatest = tl.load(ptr + 2 * part, mask=part < span.parts, other=-float("inf"))
        least = tl.load(ptr + 2 * part + 1, mask=part < span.parts, other=float("inf"))
        maximum, minimum = tl.max(greatest, axis=0), tl.min(least, axis=0)
        return (maximum - minimum <= MAX_SPAN) & (span.parts > 0), maximum


@triton.jit
def token_of_rows(lengths_ptr, row, inside, T, N):
    """Return token, sequence and number of tokens of rows, and which rows count.

    All rows of an invalid length count, since their factors are NaN.
    """
    t, n = row // N, row % N
    if lengths_ptr is None:
        return t, n, tl.zeros(row.shape, tl.int64) + T, inside
    else:
        tokens = tl.load(lengths_ptr + n, mask=inside, other=0).to(tl.int64)
        return t, n, tokens, inside & ((t < tokens) | (tokens < 1))


@triton.jit
def token_scores(batch, t, n, tokens, c, mask, OTHER: tl.constexpr):
    """Return emissions of tokens with their start and end scores, `[ROWS, BLOCK_C]` fp64."""
    emissions, start, end, c = batch.emissions, batch.start, batch.end, c.to(tl.int64)[None, :]
    at = (t * emissions.t + n * emissions.n)[:, None] + c * emissions.c
    score = loaded_to_fp64(tl.load(emissions.ptr + at, mask=mask, other=OTHER))
    if start.ptr is not None:
        at, first = (n * start.n)[:, None] + c * start.c, mask & (t == 0)[:, None]
        score += loaded_to_fp64(tl.load(start.ptr + at, mask=first, other=0.0))
    if end.ptr is not None:
        at, last = (n * end.n)[:, None] + c * end.c, mask & (t == tokens - 1)[:, None]
        score += loaded_to_fp64(tl.load(end.ptr + at, mask=last, other=0.0))
    return score


@triton.jit
def scan_steps(tokens, is_alpha, SAVE: tl.constexpr):
    """Return the number of steps of a scan: all, or half of them if the states are not saved."""
    if SAVE:
        return tokens - 1
    else:
        return tl.where(is_alpha, tokens // 2, tokens - 1 - tokens // 2)


@triton.jit
def state_offset(direction, t, n, T, N, C, SAVE: tl.constexpr):
    """Return where the states of a token are saved, and the elements from there to the next token.

    Without `SAVE`, each state of a scan is stored over the one before.
    """
    row = tl.cast(N, tl.int64) * C
    if SAVE:
        return (direction * T + t) * row + n * C, row
    else:
        return direction * row + n * C, row * 0


@triton.jit
def loaded_to_fp64(x):
    """Return loaded numbers of any dtype in fp64.

    Triton 3.6 fails to compile a product whose operand it can trace to loads of a half type. A sum
    over one element changes nothing and ends the trace.
    """
    result = x.to(tl.float64)
    if x.dtype.primitive_bitwidth < 32:
        result = tl.sum(tl.expand_dims(result, 0), axis=0)
    return result


@triton.jit
def load_end(end, n, c, C):
    """Return the scores of start or end, `[BLOCK_C]` in their dtype; zeros if there are none."""
    if end.ptr is None:
        return c.to(tl.float64) * 0.0
    else:
        at = n * end.n + c.to(tl.int64) * end.c
        return tl.load(end.ptr + at, mask=c < C, other=0.0)


@triton.jit
def load_rows(score_ptr, maxima_ptr, i, num_steps, stride_t, stride_m, c, C, AHEAD: tl.constexpr):
    """Load emissions, and maxima if there are some, of the AHEAD steps from step i, before use."""
    scores, maxima = (), ()
    for j in tl.static_range(AHEAD):
        row = tl.cast(i + j, tl.int64)
        at = score_ptr + row * stride_t
        scores += (tl.load(at, mask=(c < C) & (i + j <= num_steps), other=-float("inf")),)
        if maxima_ptr is not None:
            maxima += (tl.load(maxima_ptr + row * stride_m, mask=i + j <= num_steps, other=0.0),)
    return scores, maxima


@triton.jit
def fold_ends(score, t, tokens, start, end):
    """Return the emissions of token t with the start score of the first and the end of the last."""
    score = score.to(tl.float64)
    score = tl.where(t == 0, score + start, score)
    return tl.where(t == tokens - 1, score + end, score)


@triton.jit
def exp_split(x, EXACT: tl.constexpr):
    """Return e**x in fp64 for x <= 0, with the fraction of its logarithm in fp32 unless EXACT."""
    if EXACT:
        return tl.exp(x)
    else:
        power = x * LOG2E_FP64
        bounded = tl.where(power < -1100.0, -1100.0, power)
        whole = bounded.to(tl.int32)
        fraction = tl.exp2((bounded - whole.to(tl.float64)).to(tl.float32)).to(tl.float64)
        return fraction * tl.where(whole > -1022, power_of_2(whole), 0.0)


@triton.jit
def exp_sum_term(x, EXACT: tl.constexpr):
    """Return e**x in fp64 for x <= 0, a term of a sum, in fp32 unless EXACT."""
    if EXACT:
        return tl.exp(x)
    else:
        return tl.exp2((x * LOG2E_FP64).to(tl.float32)).to(tl.float64)


@triton.jit
def power_of_2(exponent):
    """Return 2**exponent in fp64 for -1022 <= exponent <= 1023."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def exponent_of(x):
    """Return the exponent of a number x >= 0, in -1000 to 1000; 0 for 0 and NaN."""
    exponent = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023
    exponent = tl.minimum(tl.maximum(exponent, -1000), 1000)
    return tl.where(x > 0.0, exponent, 0)
