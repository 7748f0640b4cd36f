"""The posteriors of states that kernels for small tables store, on a GPU."""

import pytest
import torch

import partita
from partita import Chain

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def stored_posteriors(
    chain: Chain, *, with_viterbi: bool, modulus: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the posteriors `[T + 1, N, C]` of the kernels, NaN past the lengths, and the first.

    Sums of four states are possible if 4 is a multiple of the modulus.
    """
    from partita.ops.chain.gpu.launch_paths import (
        chain_viterbi,
        launch_posteriors,
        posterior_buffers,
    )

    inputs = chain._potentials
    buffers = posterior_buffers(chain.scores, chain.source, modulus)
    assert buffers is not None
    for buffer in buffers:
        buffer.view(torch.uint8).fill_(0xFF)  # NaN
    if with_viterbi:
        expected = chain_viterbi(inputs, True)
        found = chain_viterbi(inputs, True, buffers.saved)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    launch_posteriors(inputs, buffers, are_saved=with_viterbi)
    return buffers.posteriors, buffers.first


def expected_posteriors(chain: Chain) -> torch.Tensor:
    """Return the posteriors `[T + 1, N, C]` in fp64, NaN past the lengths."""
    with partita.backend("reference"):
        ends = (chain.initial.double(), chain.final.double())
        exact = Chain(chain.scores.double(), chain.source, *ends, lengths=chain.lengths)
        alpha, beta, logz = exact.forward_scores(), exact.backward_scores(), exact.logz()
    posterior = (alpha + beta - logz[:, None]).exp()
    posterior = torch.where(logz[:, None] == -torch.inf, 0.0, posterior)
    if chain.lengths is None:
        return posterior
    time = torch.arange(len(alpha), device=alpha.device)[:, None, None]
    return torch.where(time > chain.lengths[:, None], torch.nan, posterior)


def small_chain(T: int, N: int, C: int, K: int, kind: str, dtype: torch.dtype) -> Chain:
    """Return ragged chains over K permutations of the states, with impossible edges."""
    g = torch.Generator().manual_seed(T + C)
    source = torch.stack([torch.randperm(C, generator=g) for _ in range(K)], 1)
    if kind == "missing":
        source[torch.rand(C, K, generator=g) < 0.3] = -1
    if kind == "repeated":
        source = source[:, :1].repeat(1, K)
    scores = torch.randn(T, N, C, K, generator=g) * 2
    scores[torch.rand(scores.shape, generator=g) < 0.2] = -torch.inf
    scores[T // 2, -1] = -torch.inf
    scores[..., source < 0] = torch.nan
    lengths = torch.randint(0, T + 1, (N,), generator=g)
    lengths[-2:] = T
    scores[torch.arange(T)[:, None] >= lengths] = torch.nan
    ends = torch.randn(2, N, C, generator=g).to(DEVICE)
    ends[0, 0, : C // 2] = -torch.inf
    if kind == "strided":
        scores = scores.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    scores = scores.to(DEVICE, dtype)
    return Chain(scores, source.to(DEVICE), *ends, lengths=lengths.to(DEVICE))


@pytest.mark.parametrize("with_viterbi", [False, True])
@pytest.mark.parametrize("kind", ["regular", "missing", "repeated", "strided"])
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 3, 2), (2, 3, 2, 1), (9, 5, 13, 5), (40, 4, 64, 5), (33, 3, 256, 3), (30, 3, 1024, 5)],
    ids=str,
)
def test_posteriors_of_states(shape: tuple[int, ...], kind: str, with_viterbi: bool) -> None:
    """Ragged and empty chains, impossible edges and chains, tables of all kinds, any strides."""
    chain = small_chain(*shape, kind, torch.float16)
    found, first = stored_posteriors(chain, with_viterbi=with_viterbi)
    expected = expected_posteriors(chain)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(first, found[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "strided"), (torch.bfloat16, "regular")]
)
@pytest.mark.parametrize("modulus", [1, 2, 4])
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 32, 2), (9, 5, 64, 5), (33, 3, 128, 3), (40, 3, 256, 2), (9, 4, 1024, 5)],
    ids=str,
)
def test_sums_of_posteriors(
    shape: tuple[int, ...], modulus: int, kind: str, dtype: torch.dtype
) -> None:
    """The sums add up to those of the states that are equal modulo the number that was given."""
    chain = small_chain(*shape, kind, dtype)
    found, first = stored_posteriors(chain, with_viterbi=True, modulus=modulus)
    T, N, C = shape[:3]
    assert found.shape == (T + 1, N, C // 4)
    states, first_states = stored_posteriors(chain, with_viterbi=True)
    sums, expected = (x.double().unflatten(2, (-1, modulus)).sum(2) for x in (found, states))
    torch.testing.assert_close(sums, expected, rtol=3e-7, atol=0, equal_nan=True)
    assert torch.equal(first, first_states)
    second = stored_posteriors(chain, with_viterbi=True, modulus=modulus)[0]
    assert torch.equal(found.view(torch.int32), second.view(torch.int32))


def test_states_that_do_not_fill_a_block_have_no_sums() -> None:
    chain = small_chain(5, 2, 16, 3, "regular", torch.float32)
    assert stored_posteriors(chain, with_viterbi=True, modulus=4)[0].shape == (6, 2, 16)


@pytest.mark.long
@pytest.mark.parametrize("stay", [0.0, 8.0])
def test_posteriors_of_long_chains(stay: float) -> None:
    """Errors do not add up over 20,000 steps, of which most stay in their state."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, 2, 64, 5, generator=g)
    scores[..., 0] += stay
    ends = torch.zeros(2, 2, 64, device=DEVICE)
    chain = Chain(scores.to(DEVICE), partita.debruijn_source(4, 3).to(DEVICE), *ends)
    expected = expected_posteriors(chain)
    found, _ = stored_posteriors(chain, with_viterbi=True)
    found = found.double() / found.double().sum(2, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)
