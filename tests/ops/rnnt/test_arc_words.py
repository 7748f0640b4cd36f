"""Probabilities of arcs and states as words, and sums of their products."""

import math
from fractions import Fraction

import pytest
import torch
from helpers.rows import kernel_devices
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from partita.ops.rnnt.gpu.arc_rows import NO_CARRY
from partita.ops.rnnt.gpu.arc_words import (
    ARC_BIAS,
    LEAST_SCORE,
    LEAST_STATE,
    STATE_BIAS,
    UNREACHED,
    add_product,
    arc_exponent,
    arc_word,
    exp2_parts,
    exp_parts,
    halves,
    normalized,
    state_of_word,
    state_word,
    sum_of_terms,
)

BLOCK = 64


@triton.jit
def arcs_kernel(
    scores_ptr, words_ptr, nan_ptr, parts_ptr, BLOCK: tl.constexpr, PRECISE: tl.constexpr
):
    """Make words of arcs from the scores of tokens and durations, and read them again."""
    lane = tl.arange(0, BLOCK)
    token = exp2_parts(tl.load(scores_ptr + lane))
    duration = exp2_parts(tl.load(scores_ptr + BLOCK + lane))
    word, is_nan = arc_word(token, duration, lane >= 0, PRECISE)
    tl.store(words_ptr + lane, word)
    tl.store(nan_ptr + lane, is_nan.to(tl.int32))
    lower, upper = halves(word)
    one = lane.to(tl.float64) * 0.0 + 1.0
    significand = add_product(one * 0.0, lower, upper, one, lane * 0 + 1023, PRECISE)
    tl.store(parts_ptr + lane, significand)
    tl.store(parts_ptr + BLOCK + lane, arc_exponent(upper, PRECISE).to(tl.float64))


@triton.jit
def states_kernel(states_ptr, words_ptr, parts_ptr, BLOCK: tl.constexpr):
    """Make words of states, and read them and other words again."""
    lane = tl.arange(0, BLOCK)
    exponent = tl.load(states_ptr + BLOCK + lane).to(tl.int32)
    tl.store(words_ptr + lane, state_word(tl.load(states_ptr + lane), exponent))
    tl.debug_barrier()
    significand, exponent = state_of_word(tl.load(words_ptr + lane))
    tl.store(parts_ptr + lane, significand)
    tl.store(parts_ptr + BLOCK + lane, exponent.to(tl.float64))
    significand, exponent = state_of_word(tl.load(words_ptr + BLOCK + lane))
    tl.store(parts_ptr + 2 * BLOCK + lane, significand)
    tl.store(parts_ptr + 3 * BLOCK + lane, exponent.to(tl.float64))


@triton.jit
def sums_kernel(x_ptr, result_ptr, BLOCK: tl.constexpr):
    """Write the sums and the normalized states of numbers, and softmax terms."""
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane)
    significand, exponent = normalized(x, lane + ARC_BIAS + STATE_BIAS)
    tl.store(result_ptr + lane, significand)
    tl.store(result_ptr + BLOCK + lane, (exponent - STATE_BIAS - lane).to(tl.float64))
    _, exponent = normalized(x, lane - 2**30)
    tl.store(result_ptr + 3 * BLOCK + lane, exponent.to(tl.float64))
    _, _, term = exp_parts(tl.load(x_ptr + BLOCK + lane))
    tl.store(result_ptr + 2 * BLOCK + lane, sum_of_terms(term))


def padded(values: list[float], device: str) -> Tensor:
    return torch.tensor([*values, *[0.0] * (BLOCK - len(values))], dtype=torch.float64).to(device)


def arcs_of(
    tokens: list[float], durations: list[float], precise: bool, device: str
) -> tuple[Tensor, Tensor]:
    """Return which arcs are NaN, and the significands and exponents of their words."""
    scores = torch.cat([padded(tokens, device), padded(durations, device)])
    words = torch.zeros(BLOCK, dtype=torch.int64, device=device)
    is_nan = torch.zeros(BLOCK, dtype=torch.int32, device=device)
    parts = torch.zeros(2, BLOCK, dtype=torch.float64, device=device)
    arcs_kernel[(1,)](scores, words, is_nan, parts, BLOCK=BLOCK, PRECISE=precise)
    assert (words >> 32 != 0).all()
    return is_nan, parts


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize(("precise", "bits"), [(False, 33), (True, 41)])
def test_words_of_arcs(precise: bool, bits: int, device: str) -> None:
    """The whole range of scores, near and at probability 1, and with a fraction of ones."""
    g = torch.Generator().manual_seed(0)
    least = LEAST_SCORE.value
    tokens = [0.0, 0.0, -1e-300, -1e-12, math.log2(2 - 2**-30) - 1, -1.0, -1e4, least, least]
    tokens += [-1e5 * x for x in torch.rand(40, generator=g, dtype=torch.float64).tolist()]
    durations = [0.0, -1e4, -0.5, -1e-12, 0.0, -1.0, least, least, 0.0]
    durations += [-3 * x for x in torch.rand(40, generator=g, dtype=torch.float64).tolist()]
    is_nan, parts = arcs_of(tokens, durations, precise, device)
    assert not is_nan.any()
    for token, duration, m, e in zip(tokens, durations, *parts.tolist(), strict=False):
        assert 1 <= m < 2
        exact = Fraction(token) + Fraction(duration)  # whose integer part has no rounding error
        power = round(exact)
        ratio = m * 2.0 ** (int(e) - ARC_BIAS.value - power) / 2.0 ** float(exact - power)
        assert abs(ratio - 1) <= 1.01 * 2**-bits + 1e-15


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize("precise", [False, True])
def test_words_of_impossible_arcs_and_of_nan(precise: bool, device: str) -> None:
    least = LEAST_SCORE.value
    tokens = [-math.inf, 0.0, least - 1, 0.0, -math.inf, -1e300, math.nan, 0.0, math.nan]
    durations = [0.0, -math.inf, 0.0, least - 1, -math.inf, -1e300, 0.0, math.nan, -math.inf]
    is_nan, (_, exponents) = arcs_of(tokens, durations, precise, device)
    assert is_nan.tolist()[:10] == [0] * 6 + [1] * 3 + [0]
    # Such an exponent is below that of any product of an arc and a state.
    assert (exponents[:6] < -(2**29)).all()


@pytest.mark.interpreted
@kernel_devices
def test_words_of_states(device: str) -> None:
    g = torch.Generator().manual_seed(0)
    significands = 1 + torch.rand(BLOCK, generator=g, dtype=torch.float64)
    significands[:2] = torch.tensor([1.0, 2 - 2**-52], dtype=torch.float64)
    exponents = torch.randint(UNREACHED.value, STATE_BIAS.value, (BLOCK,), generator=g).double()
    exponents[:3] = torch.tensor([UNREACHED.value, STATE_BIAS.value, LEAST_STATE.value])
    states = torch.stack([significands, exponents]).to(device)
    words = torch.full((2 * BLOCK,), NO_CARRY.value, dtype=torch.int64, device=device)
    parts = torch.zeros(4, BLOCK, dtype=torch.float64, device=device)
    states_kernel[(1,)](states, words, parts, BLOCK=BLOCK)
    assert (words >> 32 != 0).all()  # Words of 0 are not written yet.
    found = parts.cpu()
    assert torch.equal(found[1], exponents)
    assert ((found[0] - significands).abs() <= 2**-36).all()
    # Where there is no carry, no path comes in.
    assert ((found[2] >= 1) & (found[2] < 2)).all() and (found[3] < 0).all()


@pytest.mark.interpreted
@kernel_devices
def test_sums(device: str) -> None:
    """Exponents of states do not fall below the least, and NaN stays NaN in sums of integers."""
    sums = [1.0, 1.5, 2.0, 31.9, 2.0**40]
    logs = [0.0, -1.0, -30.0, -1e4, -math.inf, math.nan]
    x = torch.cat([padded(sums, device), padded(logs, device)])
    result = torch.zeros(4, BLOCK, dtype=torch.float64, device=device)
    sums_kernel[(1,)](x, result, BLOCK=BLOCK)
    for value, m, e in zip(sums, *result[:2].tolist(), strict=False):
        assert 1 <= m < 2 and m * 2**e == value
    terms = result[2].tolist()
    for value, term in zip(logs[:5], terms, strict=False):
        assert term == pytest.approx(math.exp(value), abs=2**-50)
    assert math.isnan(terms[5])
    assert (result[3] == UNREACHED.value).all()
