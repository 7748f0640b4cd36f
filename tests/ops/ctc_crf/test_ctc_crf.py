"""CTC-CRF against every path through the k-mers written out, and at the edges of the contract."""

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.rows import devices, kernel_devices
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita import Chain
from partita.ops.ctc_crf import reference
from partita.testing import all_paths

BACKENDS = ["reference", "numba"]
backends = pytest.mark.parametrize("backend", BACKENDS)
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True)
def _numba(request: pytest.FixtureRequest) -> None:
    if "numba" in request.node.name:
        pytest.importorskip("numba")


def spelt(states: list[int], edges: list[int], n_base: int, state_len: int) -> list[int]:
    """The labels of a path: its first k-mer, then the last base of each k-mer that it moves into."""
    first = [states[0] // n_base ** (state_len - 1 - i) % n_base + 1 for i in range(state_len)]
    return first + [
        state % n_base + 1
        for state, edge in zip(states[1:], edges, strict=True)
        if edge % (n_base + 1)
    ]


def enumerated(
    scores: torch.Tensor, target: list[int], state_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a sequence and its gradient, from all paths; of `[T, C, A]`, with as many steps as count."""
    steps, count, letters = scores.shape
    paths = all_paths(Chain(scores[:, None], partita.debruijn_source(letters - 1, state_len)))
    rows = zip(paths.states.tolist(), paths.edges.tolist(), strict=True)
    mine = torch.tensor(
        [spelt(states, edges, letters - 1, state_len) == target for states, edges in rows],
        dtype=torch.bool,
    )
    total = paths.scores.logsumexp(0)
    loss, grad = (
        total - paths.scores[mine].logsumexp(0),
        torch.zeros(steps, count * letters, dtype=torch.float64),
    )
    if not loss.isfinite():
        return torch.tensor(math.inf, dtype=torch.float64), grad.reshape(scores.shape)
    p = (paths.scores - total).exp() - torch.where(mine, (paths.scores - total + loss).exp(), 0.0)
    for t in range(steps):
        grad[t].index_add_(0, paths.edges[:, t], p)
    return loss, grad.reshape(scores.shape)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[int]], list[int], int]:
    """Scores `[T, N, C, A]`, targets, input lengths and the length of a k-mer."""
    steps, n_base, count = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    state_len = draw(st.integers(1, 2 if n_base == 3 else 3))
    targets = [draw(st.lists(st.integers(1, n_base), max_size=5)) for _ in range(count)]
    lengths = [draw(st.integers(0, steps)) for _ in range(count)]
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    scores = torch.randn(
        steps, count, n_base**state_len, n_base + 1, generator=g, dtype=torch.float64
    )
    scores[torch.rand(scores.shape, generator=g) < draw(st.sampled_from([0.0, 0.2]))] = -torch.inf
    scores[torch.arange(steps)[:, None] >= torch.tensor(lengths, dtype=torch.int64)] = torch.nan
    return scores, targets, lengths, state_len


def padded(targets: list[list[int]]) -> torch.Tensor:
    most = max(map(len, targets), default=0)
    return torch.tensor([t + [0] * (most - len(t)) for t in targets], dtype=torch.int64).reshape(
        len(targets), most
    )


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(BACKENDS), st.booleans())
def test_against_every_path(batch: tuple[Any, ...], backend: str, joined: bool) -> None:
    scores, targets, lengths, state_len = batch
    x = scores.requires_grad_()
    labels = (
        torch.tensor(list(itertools.chain(*targets)), dtype=torch.int64)
        if joined
        else padded(targets)
    )
    sizes = {"state_len": state_len, "alphabet_size": scores.shape[3]}
    with partita.backend(backend):
        losses = partita.ctc_crf_loss(
            x, labels, [len(t) for t in targets], **sizes, input_lengths=lengths, reduction="none"
        )
        (grad,) = torch.autograd.grad(losses.nan_to_num(posinf=0.0).sum(), x)
    for n, target in enumerate(targets):
        loss, expected = enumerated(scores.detach()[: lengths[n], n], target, state_len)
        torch.testing.assert_close(losses[n].detach(), loss, **EXACT)
        torch.testing.assert_close(grad[: lengths[n], n], expected, **EXACT)
        assert (grad[lengths[n] :, n] == 0).all()


def test_the_table_of_kmers() -> None:
    """An edge leaves the k-mer of another first base, and enters that of the following base."""
    for n_base, state_len in ((1, 2), (2, 3), (4, 1), (4, 3)):
        source = partita.debruijn_source(n_base, state_len)
        states = torch.arange(n_base**state_len)
        assert torch.equal(source[:, 0], states)
        for base in range(n_base):
            assert torch.equal(
                source[:, 1 + base], base * n_base ** (state_len - 1) + states // n_base
            )


CASE = {"state_len": 2, "alphabet_size": 4}


def sample(
    dtype: torch.dtype = torch.float64, steps: int = 12
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five sequences over pairs of three bases: one target repeats a base, one is a pair, one is too short, one has no steps to spare."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(steps, 5, 9 * 4, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(1, 4, (5, 6), generator=g)
    targets[0] = 2
    return (
        scores,
        targets,
        torch.tensor([6, 2, 1, 6, 4]),
        torch.tensor([steps, steps - 3, steps, 4, 1 + steps // 2]),
    )


def loss_of(x: torch.Tensor, rest: Any, **options: Any) -> torch.Tensor:
    targets, lengths, inputs = rest
    return partita.ctc_crf_loss(x, targets, lengths, **CASE, input_lengths=inputs, **options)


def composed(
    scores: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, inputs: torch.Tensor
) -> torch.Tensor:
    """The losses by recursions over time in PyTorch."""
    source, losses = partita.debruijn_source(3, 2), []
    for n in range(len(targets)):
        steps = scores[: inputs[n], n].unflatten(1, (9, 4))
        every = scores.new_zeros(9)
        for step in steps:
            every = (step + every[source]).logsumexp(1)
        bases = [int(label) - 1 for label in targets[n, : lengths[n]]]
        pairs = [3 * a + b for a, b in itertools.pairwise(bases)]
        mine = [scores.new_zeros(())] + [scores.new_full((), -1e9)] * (len(pairs) - 1)
        for step in steps:
            stay = [value + step[pair, 0] for value, pair in zip(mine, pairs, strict=False)]
            move = [
                value + step[pair, 1 + base]
                for value, pair, base in zip(mine, pairs[1:], bases, strict=False)
            ]
            mine = stay[:1] + [torch.logaddexp(a, b) for a, b in zip(stay[1:], move, strict=True)]
        losses.append(every.logsumexp(0) - mine[-1] if pairs else scores.new_full((), torch.inf))
    return torch.stack(losses)


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_against_recursions_in_pytorch(dtype: torch.dtype, backend: str) -> None:
    scores, *rest = sample(dtype)
    x, truth = scores.requires_grad_(), scores.detach().double().requires_grad_()
    with partita.backend(backend):
        losses = loss_of(x, rest, reduction="none")
        (grad,) = torch.autograd.grad(losses, x, torch.arange(1.0, 6.0, dtype=losses.dtype))
    expected = composed(truth, *rest)
    (expected_grad,) = torch.autograd.grad(
        expected, truth, torch.arange(1.0, 6.0, dtype=torch.float64)
    )
    assert losses.dtype == torch.promote_types(dtype, torch.float32) and grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        losses.double(), expected, rtol=4 * torch.finfo(losses.dtype).eps, atol=0.0
    )
    torch.testing.assert_close(
        grad.double(), expected_grad, rtol=2 * eps, atol=1e-6 if eps > 1e-9 else 1e-12
    )
    assert (grad[:, 2] == 0).all()


@devices
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_forms_of_the_arguments(reduction: str, device: str) -> None:
    """Both shapes of scores, padded and concatenated targets, lengths as tensors, lists and tuples of any dtype."""
    scores, targets, lengths, inputs = sample()
    scores, targets, lengths, inputs = (
        t[:, [0, 1, 3]] if t is scores else t[[0, 1, 3]] for t in (scores, targets, lengths, inputs)
    )
    joined = torch.cat([t[:n] for t, n in zip(targets, lengths.tolist(), strict=True)])
    losses = composed(scores, targets, lengths, inputs)
    expected = {"none": losses, "mean": (losses / lengths).mean(), "sum": losses.sum()}[reduction]
    for x in (
        scores,
        scores.unflatten(2, (9, 4)),
        scores.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    ):
        for target in (targets, targets.int(), joined, joined.to(torch.uint8)):
            for form in (
                lambda t: t,
                lambda t: t.to(device),
                lambda t: t.int(),
                torch.Tensor.tolist,
                lambda t: tuple(t.tolist()),
            ):
                loss = loss_of(
                    x.to(device),
                    (target.to(device), form(lengths), form(inputs)),
                    reduction=reduction,
                )
                torch.testing.assert_close(loss.cpu(), expected)


@backends
def test_short_targets_are_impossible(backend: str) -> None:
    x = torch.zeros(3, 5, 8, 3, requires_grad=True)
    targets = torch.tensor(
        [
            [1, 2, 1, 2, 1, 2, 1],
            [1, 2, 0, 0, 0, 0, 0],
            [0] * 7,
            [1, 2, 1, 0, 0, 0, 0],
            [1, 2, 1, 2, 0, 0, 0],
        ]
    )
    with partita.backend(backend):
        sizes = {"state_len": 3, "alphabet_size": 3, "input_lengths": [3, 3, 3, 0, 3]}
        losses = partita.ctc_crf_loss(x, targets, [7, 2, 0, 3, 4], **sizes, reduction="none")
        assert losses.tolist() == pytest.approx(
            [math.inf] * 3 + [math.log(8), math.log(8 * 27 / 3)]
        )
        (grad,) = torch.autograd.grad(losses.sum(), x)
        assert (grad[:, :4] == 0).all() and grad[:, 4].isfinite().all() and grad[:, 4].any()
        assert partita.ctc_crf_loss(x, targets, [7, 2, 0, 3, 4], **sizes) == torch.inf


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unchecked_values_make_nan_of_their_sequence(
    dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    x = torch.zeros(4, 7, 9, 4, dtype=dtype, requires_grad=True)
    targets = torch.tensor([[1, 2], [1, 9], [-3, 1], [1, 2], [1, 2], [0, 1], [1, 2]])
    rest = targets, [2, 2, 2, 2, -1, 2, 3], [3, 4, 4, 5, 4, 4, 4]
    with partita.backend(backend):
        losses = loss_of(x, rest, reduction="none")
        assert losses.isnan().tolist() == [False] + [True] * 6
        (grad,) = torch.autograd.grad(losses.sum(), x)
        assert grad[:, 0].isfinite().all() and grad[:, 1:].isnan().all()
        joined = loss_of(
            x[:, :3],
            (torch.tensor([1, 2, 1, 9, 2]), torch.tensor([2, 2, 3]), None),
            reduction="none",
        )
        assert joined.isnan().tolist() == [False, True, True]


def test_empty_batches() -> None:
    x, targets = torch.zeros(3, 0, 9, 4, requires_grad=True), torch.zeros(0, 2, dtype=torch.int64)
    assert loss_of(x, (targets, [], []), reduction="sum") == 0
    assert loss_of(x, (targets, [], [])).isnan()
    assert loss_of(x, (targets.reshape(-1), [], []), reduction="none").shape == (0,)
    (grad,) = torch.autograd.grad(loss_of(x, (targets, [], []), reduction="sum"), x)
    assert grad.shape == x.shape


@backends
def test_second_derivatives(backend: str) -> None:
    scores, targets, *_ = sample(steps=3)
    x = scores[:, :3].clone().requires_grad_()
    rest = targets[:3, :4], torch.tensor([4, 3, 1]), torch.tensor([3, 2, 3])
    with partita.backend(backend):
        f = lambda x: loss_of(x, rest, reduction="none").nan_to_num(posinf=0.0)  # noqa: E731
        assert torch.autograd.gradcheck(f, x) and torch.autograd.gradgradcheck(f, x)


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_the_kernels_of_chains(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the reference; two targets have a label, or a length, that is out of range."""
    monkeypatch.setenv("PARTITA_CHECK", "0")
    scores, targets, *rest = (t.to(device) for t in sample(dtype))
    targets[1, 0], rest[0][4], found = 4, 7, []
    for backend in ("triton", "reference"):
        x = scores.clone().requires_grad_()
        with partita.backend(backend):
            losses = loss_of(x, (targets, *rest), reduction="none")
            found.append(
                (
                    losses.detach(),
                    torch.autograd.grad(
                        losses, x, torch.arange(1.0, 6.0, dtype=dtype, device=device)
                    )[0],
                )
            )
    assert (
        found[0][0].isnan().tolist() == [False, True, False, False, True]
        and found[0][1][:, [1, 4]].isnan().all()
    )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(
            a,
            b,
            **({"rtol": 1e-6, "atol": 1e-5} if dtype == torch.float32 else EXACT),
            equal_nan=True,
        )


@devices
def test_twice_the_same_bits(device: str) -> None:
    """A target of one base alone: all its k-mers are one."""
    scores, *rest = (t.to(device) for t in sample(torch.float32, 200))
    x = scores.requires_grad_()
    rest[0] = rest[0].repeat(1, 20)
    rest[1] = 20 * rest[1]
    a, b = (torch.autograd.grad(loss_of(x, rest), x)[0] for _ in range(2))
    assert torch.equal(a, b)


@devices
@pytest.mark.parametrize("slab", [1, 40, 2**22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_subtraction_at_places_that_are_equal(
    dtype: torch.dtype, slab: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "SLAB", slab)
    g = torch.Generator().manual_seed(0)
    places = torch.randint(0, 12, (3, 8, 2), generator=g)
    marginals = (
        torch.rand(7, 3, 8, 2, generator=g, dtype=torch.float64)
        .flatten(2)
        .softmax(2)
        .unflatten(2, (8, 2))
    )
    marginals[:, :, 0, 1] = 0.0  # nothing moves into the first state
    dense, factor = (
        torch.randn(7, 3, 4, 3, generator=g, dtype=torch.float64),
        torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64),
    )
    expected = dense.flatten(2).scatter_add(
        2, places.flatten(1).expand(7, -1, -1), -(marginals * factor[:, None, None]).flatten(2)
    )
    unit = 2.0 ** reference.FIXED[dtype][1]
    ours = dense.to(dtype).to(device)
    reference.subtract(
        ours,
        (marginals * unit).to(dtype).to(device),
        places.to(device),
        (factor / unit).to(dtype).to(device),
    )
    torch.testing.assert_close(
        ours.double().cpu(),
        expected.reshape(ours.shape),
        rtol=0,
        atol=1e-6 if dtype == torch.float32 else 1e-14,
    )


@devices
def test_long_sequences(device: str) -> None:
    """Losses and gradients in fp32, 3,000 steps and 400 labels, beside fp64; one target is of one base alone."""
    g = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(3000, 2, 16 * 5, generator=g)
    targets, found = torch.randint(1, 5, (2, 400), generator=g), []
    targets[1] = 3
    for dtype in (torch.float32, torch.float64):
        x = scores.to(dtype).to(device).requires_grad_()
        loss = partita.ctc_crf_loss(
            x,
            targets.to(device),
            [400, 350],
            state_len=2,
            alphabet_size=5,
            input_lengths=[3000, 2500],
            reduction="sum",
        )
        found.append((loss.detach().double(), torch.autograd.grad(loss, x)[0].double()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-5)
    assert (found[0][1] - found[1][1]).abs().max() <= 4e-6


@devices
def test_fullgraph(device: str) -> None:
    scores, *rest = (t.to(device) for t in sample(torch.float32))
    x = scores.requires_grad_()
    f = lambda x: loss_of(x, rest, reduction="none").nan_to_num(posinf=0.0).sum()  # noqa: E731
    expected = torch.autograd.grad(f(x), x)[0]
    with mock.patch.dict("os.environ", {"PARTITA_CHECK": "0"}):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [False, True])
def test_no_synchronisation_with_the_host(joined: bool) -> None:
    scores, targets, lengths, inputs = (t.cuda() for t in sample(torch.float32))
    rest = targets.flatten()[: int(lengths.sum())] if joined else targets, lengths, inputs
    x = scores.requires_grad_()
    torch.autograd.grad(loss_of(x, rest), x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(loss_of(x, rest), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_capture_and_replay() -> None:
    scores, *rest = (t.cuda() for t in sample(torch.float32))
    x = scores.requires_grad_()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.autograd.grad(loss_of(x, rest), x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = torch.autograd.grad(loss_of(x, rest), x)[0]
    with torch.no_grad():
        x.mul_(0.5)
    graph.replay()
    assert torch.equal(captured, torch.autograd.grad(loss_of(x, rest), x)[0])


@pytest.mark.gpu
def test_peak_memory() -> None:
    """The gradient, the states of all k-mers, and the lattice's marginals: 1 + 0.4 + 2 · 160 / 1,280 of the scores, and what is subtracted at a time."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1000, 32, 256 * 5, generator=g, device="cuda", requires_grad=True)
    targets, lengths = (
        torch.randint(1, 5, (32, 163), generator=g, device="cuda"),
        torch.full((32,), 163, device="cuda"),
    )
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(
            partita.ctc_crf_loss(x, targets, lengths, state_len=4, alphabet_size=5), x
        )
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 2.5 * x.numel() * x.element_size()


BAD = {
    "dtype": (
        {"scores": torch.zeros(3, 2, 36).long()},
        TypeError,
        "scores: expected a floating dtype",
    ),
    "rank": (
        {"scores": torch.zeros(3, 36)},
        ValueError,
        r"scores: expected shape \[T, N, C \* A\] or \[T, N, C, A\] with C = 3\^2 = 9 and A = 4",
    ),
    "size": (
        {"scores": torch.zeros(3, 2, 35)},
        ValueError,
        r"scores: expected shape .*, got \[3, 2, 35\]",
    ),
    "state_len": (
        {"state_len": 0},
        ValueError,
        "state_len: expected a number of at least 1, got 0",
    ),
    "alphabet_size": (
        {"alphabet_size": 1},
        ValueError,
        "alphabet_size: expected a number of at least 2, got 1",
    ),
    "targets dtype": (
        {"targets": torch.zeros(2, 2)},
        TypeError,
        "targets: expected an integer dtype",
    ),
    "targets shape": (
        {"targets": torch.ones(3, 2).long()},
        ValueError,
        r"targets: expected shape \[N, S\] with N = 2",
    ),
    "label": (
        {"targets": torch.tensor([[1, 2], [3, 4]])},
        IndexError,
        r"targets: expected labels from 1 to 3, got 4 at \[1, 1\]",
    ),
    "no label": (
        {"targets": torch.tensor([1, 0, 3, 3])},
        IndexError,
        r"targets: expected labels from 1 to 3, got 0 at \[1\]",
    ),
    "input length": (
        {"input_lengths": [3, 4]},
        ValueError,
        r"input_lengths: expected steps from 0 to 3, got 4 at \[1\]",
    ),
    "target length": (
        {"target_lengths": [-1, 2]},
        ValueError,
        r"target_lengths: expected labels from 0 to 2, got -1 at \[0\]",
    ),
    "number of lengths": (
        {"target_lengths": [1]},
        ValueError,
        r"target_lengths: expected shape \[N\] = \[2\], got \[1\]",
    ),
    "sum of lengths": (
        {"targets": torch.ones(5).long()},
        ValueError,
        "targets: expected as many labels as the sum of target_lengths, 4, got 5",
    ),
    "reduction": (
        {"reduction": "max"},
        ValueError,
        "reduction: expected one of 'none', 'mean', 'sum', got 'max'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changes, error, message = BAD[name]
    good = {
        "scores": torch.zeros(3, 2, 36),
        "targets": torch.ones(2, 2).long(),
        "target_lengths": [2, 2],
        **CASE,
    }
    with pytest.raises(error, match=message):
        partita.ctc_crf_loss(**{**good, **changes})


@pytest.mark.parametrize("sizes", [(0, 1), (4, 0), (4, 1.5), (True, 2)])
def test_bad_sizes_of_a_table(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected a number of at least 1"):
        partita.debruijn_source(*sizes)
