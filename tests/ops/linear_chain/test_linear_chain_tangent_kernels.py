"""The GPU kernels for means over paths of dense linear chains and their derivatives."""

import pytest
import torch
from helpers.rows import INTERPRETING, kernel_devices
from helpers.token_chains import KINDS, random_linear_chain, scores_of
from torch import Tensor

import partita
from partita import LinearChain
from partita.ops.linear_chain import autograd
from partita.testing import poisoned_memory

SHAPES = ((1, 2, 3), (5, 3, 3), (4, 2, 20))
LARGE = ((300, 2, 4), (300, 1, 16), (60, 3, 50), (20, 3, 130))


def random_values(chain: LinearChain, per_sequence: bool = False) -> list[Tensor | None]:
    """Return values of the scores, which may be transition values of each sequence."""
    g = torch.Generator().manual_seed(7)
    _, N, C = chain.emissions.shape
    shapes = [None if x is None else x.shape for x in scores_of(chain)]
    shapes[1] = torch.Size((N, C, C)) if per_sequence else shapes[1]
    return [
        None if shape is None else torch.randn(shape, generator=g).to(chain.emissions)
        for shape in shapes
    ]


def results(
    chain: LinearChain, values: list[Tensor | None], backend: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the mean of the values and its gradients."""
    scores = [None if x is None else x.to(dtype) for x in scores_of(chain)]
    grad = torch.linspace(-1, 2, chain.emissions.shape[1], dtype=torch.float64)
    grad = grad.to(chain.emissions.device)
    with poisoned_memory():
        return autograd.tangent(grad, *scores, chain.lengths, *values, backend)


def agree(
    chain: LinearChain, per_sequence: bool = False, dtype: torch.dtype = torch.float64
) -> None:
    """Compare the kernels with the reference in fp64 of the same inputs."""
    values = random_values(chain, per_sequence)
    found = results(chain, values, "triton", dtype)
    rounded = LinearChain(*(None if x is None else x.to(dtype).double() for x in scores_of(chain)))
    rounded.lengths = chain.lengths
    expected = results(rounded, values, "reference", torch.float64)
    bound = 1e-9 if dtype == torch.float64 else 1e-5
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound, equal_nan=True)


@kernel_devices
@pytest.mark.parametrize(("forbidden", "scale"), [(0.0, 1.0), (0.4, 1.0), (0.0, 200.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_means_and_gradients(
    shape: tuple[int, int, int], forbidden: float, scale: float, device: str
) -> None:
    chain = random_linear_chain(*shape, forbidden=forbidden, scale=scale, device=device)
    agree(chain, per_sequence=scale > 1)


@kernel_devices
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_transitions(kind: str, device: str) -> None:
    agree(random_linear_chain(5, 2, 3, kind=kind, device=device))
    agree(random_linear_chain(5, 2, 3, kind=kind, ends=False, ragged=False, device=device))
    agree(random_linear_chain(5, 2, 3, kind=kind, device=device), dtype=torch.float32)


@kernel_devices
def test_infinite_values_of_impossible_paths_count_as_zero(device: str) -> None:
    chain = random_linear_chain(5, 2, 3, ragged=False, device=device)
    chain.transitions[0, 1] = chain.emissions[2, :, 0] = -torch.inf
    values = random_values(chain)
    values[1][0, 1] = values[0][2, :, 0] = torch.inf
    found, expected = (results(chain, values, b, torch.float64) for b in ("triton", "reference"))
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("unchecked")
@kernel_devices
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_invalid_lengths_stay_in_their_sequence(kind: str, device: str) -> None:
    chain = random_linear_chain(5, 5, 3, kind=kind, ragged=False, device=device)
    chain.lengths = torch.tensor([5, 0, 6, 3, 5], device=device)
    chain.emissions[1, 4, 0] = torch.nan
    mean, d_emissions, d_transitions, d_start, d_end = results(
        chain, random_values(chain), "triton", torch.float64
    )
    invalid = [False, True, True, False, True]
    assert mean.isnan().tolist() == invalid
    for x in (d_emissions.movedim(0, 1).flatten(1), d_start, d_end):
        assert x.isnan().any(1).tolist() == invalid
    if kind == "by sequence":
        assert d_transitions.isnan().any(0).flatten(1).any(1).tolist() == invalid
    else:
        assert d_transitions.isnan().any()


@kernel_devices
def test_second_derivatives_of_log_z_and_derivatives_of_the_entropy(device: str) -> None:
    chain = random_linear_chain(3, 2, 2, ragged=False, device=device)
    inputs = [x.requires_grad_() for x in scores_of(chain) if x is not None]

    def entropy(*inputs: Tensor) -> Tensor:
        return LinearChain(*inputs, lengths=[3, 2]).entropy()

    def logz(*inputs: Tensor) -> Tensor:
        return LinearChain(*inputs, lengths=[3, 2]).logz()

    with partita.backend("triton"):
        assert torch.autograd.gradcheck(entropy, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(logz, inputs, fast_mode=True)


@kernel_devices
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("shape", LARGE)
def test_large(shape: tuple[int, int, int], scale: float, device: str) -> None:
    chain = random_linear_chain(*shape, scale=scale, device=device)
    agree(chain)
    values = random_values(chain)
    first, second = (results(chain, values, "triton", torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
