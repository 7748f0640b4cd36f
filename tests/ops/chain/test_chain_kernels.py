"""The kernels of chains against the reference, under the interpreter and on a GPU."""

import pytest
import torch
from helpers.chains import TABLES, assert_logz_matches_reference, logz_and_gradients, random_chain
from helpers.rows import KERNEL_DEVICES, kernel_devices

import partita
from partita import Chain
from partita.testing import poisoned_memory

SHAPES = (
    (0, 2, 3, 2),
    (1, 3, 3, 2),
    (2, 2, 2, 1),
    (5, 4, 3, 2),
    (7, 3, 1, 3),
    (20, 3, 13, 5),
    (11, 2, 70, 3),
    (4, 2, 5, 20),
)
SEMIRINGS = ((partita.Log, "Log"), (partita.Max, "Max"))
LARGE = (
    (50, 3, 64, 5),
    (50, 3, 256, 5),
    (30, 2, 1024, 5),
    (20, 2, 1500, 3),
    (20, 2, 4096, 2),
    (20, 2, 100, 40),
    (5, 2, 16_384, 3),
    (5, 2, 20_000, 2),
)


@kernel_devices
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logz_and_gradient_match_the_reference(
    shape: tuple[int, ...], kind: str, device: str
) -> None:
    assert_logz_matches_reference(
        random_chain(*shape, kind=kind, seed=sum(shape), device=device), torch.float32
    )


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_tables(shape: tuple[int, ...], device: str) -> None:
    assert_logz_matches_reference(
        random_chain(*shape, seed=sum(shape), device=device), torch.float32
    )


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(9, 3, 6, 3), (9, 3, 6, 12)], ids=str)
def test_dtypes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates what it stores in bf16")
    assert_logz_matches_reference(random_chain(*shape, seed=1, device=device), dtype)


def other_results(chain: Chain, backend: str) -> dict[str, torch.Tensor]:
    """Return the results of all other ops of a chain, by name."""
    g = torch.Generator(chain.scores.device).manual_seed(1)
    tensors = [t.clone().requires_grad_() for t in (chain.scores, chain.initial, chain.final)]
    values = [
        torch.randn(t.shape, generator=g, dtype=t.dtype, device=t.device).requires_grad_()
        for t in tensors
    ]
    with partita.backend(backend), poisoned_memory():
        found = {
            f"{name} {label}": getattr(chain, f"{name}_scores")(S)
            for S, label in SEMIRINGS
            for name in ("forward", "backward")
        }
        found |= {f"best {name}": value for name, value in chain.viterbi()._asdict().items()}
        found |= {f"sampled {name}": value for name, value in chain.sample(5, g)._asdict().items()}
        found["entropy"] = chain.entropy()
        live = Chain(tensors[0], chain.source, *tensors[1:], lengths=chain.lengths)
        mean, best, entropy = live.expectation(*values), live.logz(partita.Max), live.entropy()
        factor = torch.linspace(0.5, 2, len(mean), device=mean.device).to(mean.dtype)
        found |= {"mean": mean, "best": best, "best without gradient": chain.logz(partita.Max)}
        for name, result, variables in (
            ("mean", mean, tensors + values),
            ("best", best, tensors),
            ("entropy", entropy, tensors),
        ):
            found |= {
                f"{name}'s gradient {i}": t
                for i, t in enumerate(torch.autograd.grad(result, variables, factor))
            }
    return found


def assert_other_ops_match_reference(chain: Chain) -> None:
    """Assert that all other ops match the reference.

    Paths are equal. Sums and means are as exact as log Z. Gradients of a mean are as exact as
    posteriors, times the values.
    """
    actual, expected = other_results(chain, "triton"), other_results(chain, "reference")
    small = 2e-6 if chain.scores.dtype.itemsize < 8 else 1e-11
    for name, reference in expected.items():
        tolerance = (
            0
            if not reference.is_floating_point()
            else max(small, 2 * torch.finfo(reference.dtype).eps)
        )
        atol = tolerance * (len(chain.scores) + 10) * 10 if tolerance else 0
        torch.testing.assert_close(
            actual[name],
            reference,
            rtol=tolerance,
            atol=atol,
            equal_nan=True,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@kernel_devices
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_ops_match_the_reference(shape: tuple[int, ...], kind: str, device: str) -> None:
    if device == "cpu" and (shape not in SHAPES[::3] or kind not in TABLES[::2]):
        pytest.skip("the interpreter is slow: it runs one case in six")
    assert_other_ops_match_reference(
        random_chain(*shape, kind=kind, seed=sum(shape), device=device)
    )


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("shape", (*SHAPES, *LARGE), ids=str)
def test_other_ops_in_bf16(shape: tuple[int, ...], device: str) -> None:
    chain = random_chain(*shape, seed=sum(shape), device=device, dtype=torch.bfloat16)
    assert_other_ops_match_reference(chain)


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    "shape", [(40, 5, 5, 3), (400, 5, 64, 5), (700, 3, 200, 4), (300, 2, 1024, 5)], ids=str
)
def test_ties_are_broken_as_promised(shape: tuple[int, ...], kind: str, device: str) -> None:
    """Scores have few values, so that almost every path has an equal."""
    kind = "any" if kind == "dense" and shape[2] > 64 else kind
    chain = random_chain(*shape, kind=kind, seed=sum(shape), device=device, dtype=torch.float32)
    for scale in (0.0, 1.0, 30.0):
        rounded = Chain(
            (chain.scores * scale).nan_to_num(0.0, neginf=-torch.inf).round(),
            chain.source,
            lengths=chain.lengths,
        )
        actual, expected = (path_of(rounded, backend) for backend in ("triton", "reference"))
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)


def path_of(chain: Chain, backend: str) -> partita.ViterbiPath:
    """Return the best path that a backend finds."""
    with partita.backend(backend), poisoned_memory():
        return chain.viterbi()


@kernel_devices
@pytest.mark.parametrize("backend", ["triton", "auto", "reference"])
def test_gradients_of_results_in_any_stride(backend: str, device: str) -> None:
    """`sum().backward()` gives a gradient of stride 0, which no copy makes contiguous."""
    chain = random_chain(6, 3, 4, 3, device=device, dtype=torch.float32, forbidden=0.0)
    scores = chain.scores.clone().requires_grad_()
    live = Chain(scores, chain.source, chain.initial, chain.final, lengths=chain.lengths)
    factor = torch.tensor(1.5, device=device)
    with partita.backend(backend):
        for result in (live.logz(), live.logz(partita.Max), live.entropy()):
            contiguous, *others = (
                torch.autograd.grad(result, scores, grad, retain_graph=True)[0]
                for grad in (
                    factor.expand(3).contiguous(),
                    factor.expand(3),
                    factor.expand(3, 2).contiguous()[:, 1],
                )
            )
            for other in others:
                assert torch.equal(other.nan_to_num(7.0), contiguous.nan_to_num(7.0))


@kernel_devices
@pytest.mark.parametrize("backend", ["triton", "auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_results_are_rounded_once(dtype: torch.dtype, backend: str, device: str) -> None:
    """The op rounds log Z itself, with a gradient and without."""
    chain = random_chain(6, 3, 4, 3, device=device, dtype=dtype)
    expected_dtype = torch.promote_types(dtype, torch.float32)
    with partita.backend(backend):
        exact = chain._ops.log_partitions(chain._potentials)[0]
        assert exact.dtype == torch.float64
        scores = chain.scores.clone().requires_grad_()
        live = Chain(scores, chain.source, chain.initial, chain.final, lengths=chain.lengths)
        for logz in (live.logz(), chain.logz()):
            assert logz.dtype == expected_dtype and torch.equal(logz, exact.to(expected_dtype))
        best = chain.viterbi().score
        assert best.dtype == expected_dtype
        assert torch.equal(best, live.logz(partita.Max))


@pytest.mark.usefixtures("unchecked")
@kernel_devices
def test_an_invalid_source_makes_all_chains_nan(device: str) -> None:
    chain = random_chain(5, 3, ragged=False, forbidden=0.0, device=device)
    chain.source = chain.source + 2
    for result in logz_and_gradients(chain, "triton", torch.float32):
        assert result.isnan().all()
    for name, result in other_results(chain, "triton").items():
        assert (result.isnan() if result.is_floating_point() else result == -1).all(), name


@pytest.mark.long
@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("states", [64, 256])
def test_long_chains(states: int, device: str) -> None:
    """Test 20,000 steps over k-mers."""
    source = partita.debruijn_source(4, 3 if states == 64 else 4).to(device)
    scores = torch.randn(20_000, 1, states, 5, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    actual = Chain(scores, source)
    with partita.backend("triton"):
        z, marginals = actual.logz(), actual.marginals()
    with partita.backend("reference"):
        expected = Chain(scores.double(), source)
        assert (z - expected.logz()).abs() <= 1e-6 * expected.logz().abs() + 2e-5
        assert (marginals - expected.marginals()).abs().max() <= 2e-6
