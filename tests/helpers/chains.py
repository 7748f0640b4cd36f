"""Chains for tests: random ones, and small ones whose paths can be enumerated."""

from collections.abc import Iterable

import torch
from hypothesis import strategies as st

import partita
from partita import Chain, Semiring
from partita.testing import poisoned_memory

TABLES = ("any", "dense", "missing", "repeated")
NUMBER_OF_PATHS = Semiring(0.0, 1.0, torch.mul, torch.sum)


def assert_close_fp64(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, equal_nan=True)


def table(kind: str, states: int, slots: int, generator: torch.Generator) -> torch.Tensor:
    """Return the sources `[states, slots]`, or `[states, states]` of a dense table."""
    if kind == "dense":
        return torch.arange(states).repeat(states, 1)
    source = torch.randint(
        -1 if kind == "missing" else 0, states, (states, slots), generator=generator
    )
    return source[:, :1].repeat(1, slots) if kind == "repeated" else source


def random_chain(
    steps: int = 4,
    chains: int = 3,
    states: int = 3,
    slots: int = 2,
    *,
    kind: str = "any",
    seed: int = 0,
    ragged: bool = True,
    forbidden: float = 0.2,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    ends: bool = True,
) -> Chain:
    """Return chains with standard normal scores.

    A share `forbidden` of all scores is -inf. Scores past a length and of missing edges are NaN.
    """
    g = torch.Generator().manual_seed(seed)
    source = table(kind, states, slots, g)
    scores = torch.randn(steps, chains, *source.shape, generator=g, dtype=torch.float64)
    scores[torch.rand(scores.shape, generator=g) < forbidden] = -torch.inf
    scores[..., source < 0] = torch.nan
    lengths = torch.randint(0, steps + 1, (chains,), generator=g) if ragged else None
    if lengths is not None:
        scores[torch.arange(steps)[:, None] >= lengths] = torch.nan
    of_ends = torch.randn(2, chains, states, generator=g, dtype=torch.float64)
    of_ends[torch.rand(of_ends.shape, generator=g) < forbidden] = -torch.inf
    return Chain(
        scores.to(dtype).to(device),
        source.to(device),
        *(of_ends.to(dtype).to(device) if ends else (None, None)),
        lengths=None if lengths is None else lengths.to(device),
    )


@st.composite
def small_chains(draw: st.DrawFn) -> Chain:
    """Draw chains with a few thousand paths at most."""
    kind = draw(st.sampled_from(TABLES))
    states, slots = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return random_chain(
        draw(st.integers(0, 4)),
        draw(st.integers(0, 3)),
        states,
        slots,
        kind=kind,
        seed=draw(st.integers(0, 2**20)),
        ragged=draw(st.booleans()),
        forbidden=draw(st.sampled_from([0.0, 0.3, 0.9])),
        ends=draw(st.booleans()),
    )


def logz_and_gradients(chain: Chain, backend: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return log Z with and without gradients, then the gradients of what the chain has."""
    parts = (chain.scores, chain.initial, chain.final)
    parts = [None if t is None else t.to(dtype).requires_grad_() for t in parts]
    leaves = [t for t in parts if t is not None]
    with partita.backend(backend), poisoned_memory():
        z = Chain(parts[0], chain.source, *parts[1:], lengths=chain.lengths).logz()
        grad = torch.linspace(0.5, 2, len(z), device=z.device).to(z.dtype)
        grads = torch.autograd.grad(z, leaves, grad)
        with torch.no_grad():
            alone = Chain(parts[0], chain.source, *parts[1:], lengths=chain.lengths).logz()
    return z, alone, *grads


def assert_logz_matches_reference(chain: Chain, dtype: torch.dtype) -> None:
    """Assert that log Z of the kernels and its gradients match the reference."""
    found, expected = (logz_and_gradients(chain, name, dtype) for name in ("triton", "reference"))
    assert_within_roundings(found, expected, dtype)


def assert_within_roundings(
    found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], dtype: torch.dtype
) -> None:
    """Assert that results are within 2e-6 (1e-12 in fp64), or two roundings of their own dtype."""
    tolerance = 2e-6 if dtype.itemsize < 8 else 1e-12
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        rtol = max(tolerance, 2 * torch.finfo(a.dtype).eps)
        torch.testing.assert_close(a, b, rtol=rtol, atol=2 * tolerance, equal_nan=True)
