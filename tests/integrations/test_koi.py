"""The names of koi.ctc against plain recursions in fp64, for tables and lattices of any size."""

from collections.abc import Callable

import pytest
import torch
from helpers.errors import raises
from helpers.memory import no_waits
from helpers.rows import devices
from torch import Tensor

import partita
from partita.integrations import koi

semirings = pytest.mark.parametrize("S", [koi.Log, koi.Max], ids=["Log", "Max"])
sums = {koi.Log: torch.logsumexp, koi.Max: torch.amax}
dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, {"rtol": 1e-6, "atol": 2e-6}),
        (torch.float64, {"rtol": 1e-10, "atol": 1e-10}),
    ],
)
LOWEST = -1e30  # stands for -inf where a plain recursion would compute -inf - -inf


def tables() -> list[Tensor]:
    """Return k-mers of four and of two bases, and a table that uses its states unevenly."""
    return [
        partita.debruijn_source(4, 2).int(),
        partita.debruijn_source(2, 3).int(),
        torch.tensor([[1, 2], [0, 0], [2, 0]], dtype=torch.int32),
    ]


def sample(idx: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of edges, of first states and of last states."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(7, 3, *idx.shape, generator=g, dtype=torch.float64)
    ends = torch.randn(2, 3, len(idx), generator=g, dtype=torch.float64)
    return scores.to(dtype), *ends.to(dtype)


def forwards(Ms: Tensor, idx: Tensor, v0: Tensor, S: koi.semiring) -> Tensor:
    alpha = [v0]
    for step in Ms:
        alpha.append(sums[S](step + alpha[-1][:, idx.long()], 2))
    return torch.stack(alpha)


def backwards(Ms: Tensor, idx: Tensor, vT: Tensor, S: koi.semiring) -> Tensor:
    beta = [vT]
    leaving = idx.long().flatten() == torch.arange(len(idx))[:, None]  # (state, edge)
    for step in Ms.flip(0):
        terms = (step + beta[0][:, :, None]).flatten(1)[:, None].expand(-1, len(idx), -1)
        beta.insert(0, sums[S](terms.masked_fill(~leaving, -torch.inf), 2))
    return torch.stack(beta)


def lattice(stay: Tensor, move: Tensor, lengths: list[int], S: koi.semiring) -> Tensor:
    """Return log Z of each target by a recursion over time."""
    found = []
    for n, length in enumerate(lengths):
        alpha = torch.full((length,), LOWEST, dtype=stay.dtype).index_fill(0, torch.tensor(0), 0.0)
        for t in range(len(stay)):
            moved = torch.cat([alpha.new_full((1,), LOWEST), alpha[:-1] + move[t, n, : length - 1]])
            alpha = sums[S](torch.stack([alpha + stay[t, n, :length], moved]), 0)
        found.append(alpha[-1])
    return torch.stack(found)


def gradients(f: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    variables = [t.detach().requires_grad_() for t in tensors]
    weights = torch.arange(1.0, 4.0, device=tensors[0].device)
    found = torch.autograd.grad((f(*variables) * weights).sum(), variables)
    return [grad.double().cpu() for grad in found]


@devices
@semirings
@dtypes
@pytest.mark.parametrize("table", range(3))
def test_sparse_chains(
    table: int, dtype: torch.dtype, tolerance: dict[str, float], S: koi.semiring, device: str
) -> None:
    idx = tables()[table]
    inputs = sample(idx, dtype)
    Ms, v0, vT = (t.double() for t in inputs)
    ours = [t.to(device) for t in inputs]
    alphas = koi.fwd_scores_cu_sparse(ours[0], idx, ours[1], S, K=1)
    betas = koi.bwd_scores_cu_sparse(ours[0], idx, ours[2], S, K=1)
    assert alphas.dtype == betas.dtype == dtype and alphas.is_contiguous() and betas.is_contiguous()
    torch.testing.assert_close(alphas.double().cpu(), forwards(Ms, idx, v0, S), **tolerance)
    torch.testing.assert_close(betas.double().cpu(), backwards(Ms, idx, vT, S), **tolerance)
    total = koi.logZ_cu_sparse(ours[0], idx, ours[1], ours[2], S, 1)
    torch.testing.assert_close(
        total.double().cpu(), sums[S](forwards(Ms, idx, v0, S)[-1] + vT, 1), **tolerance
    )
    found = gradients(lambda *x: koi.logZ_cu_sparse(x[0], idx, *x[1:], S), *ours)
    expected = gradients(lambda *x: sums[S](forwards(x[0], idx, x[1], S)[-1] + x[2], 1), Ms, v0, vT)
    torch.testing.assert_close(found, expected, **tolerance)


def lattice_sample(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    stay, move = (
        torch.randn(9, 3, states, generator=g, dtype=torch.float64).to(dtype).to(device)
        for states in (5, 4)
    )
    return stay, move, torch.tensor([5, 3, 1])


@devices
@semirings
@dtypes
def test_lattices(
    dtype: torch.dtype, tolerance: dict[str, float], S: koi.semiring, device: str
) -> None:
    stay, move, lengths = lattice_sample(dtype, device)
    f = lambda stay, move: koi.logZ_cu(stay, move, lengths, S)  # noqa: E731
    g = lambda stay, move: lattice(stay, move, lengths.tolist(), S)  # noqa: E731
    truth = stay.double().cpu(), move.double().cpu()
    torch.testing.assert_close(f(stay, move).double().cpu(), g(*truth), **tolerance)
    torch.testing.assert_close(gradients(f, stay, move), gradients(g, *truth), **tolerance)


@devices
def test_alignments(device: str) -> None:
    """The alignment is the derivative of the best score in both edges out of each state."""
    stay, move, lengths = lattice_sample(torch.float32, device)
    ours = koi.viterbi_alignments(stay.requires_grad_(), move, lengths)
    expected, moved = gradients(
        lambda *x: lattice(*x, lengths.tolist(), koi.Max) / torch.arange(1.0, 4.0),
        stay.double().cpu(),
        move.double().cpu(),
    )
    expected[:, :, :-1] += moved
    assert not ours.requires_grad and ours.dtype == torch.float32
    torch.testing.assert_close(ours.double().cpu(), expected)


def test_lattices_without_a_path() -> None:
    stay, move = torch.zeros(2, 4, 4, requires_grad=True), torch.zeros(2, 4, 3, requires_grad=True)
    lengths = torch.tensor([4, 3, 0, 5])
    total = koi.logZ_cu(stay, move, lengths)
    assert total.tolist() == [-torch.inf, 0.0, -torch.inf, -torch.inf]
    assert all((g[:, [0, 2, 3]] == 0).all() for g in torch.autograd.grad(total.sum(), (stay, move)))
    assert koi.viterbi_alignments(stay, move, lengths).sum((0, 2)).tolist() == [0.0, 2.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"move_scores: expected shape \[T, N, L - 1\]"):
        koi.logZ_cu(stay, stay, lengths)


def test_any_semiring() -> None:
    idx = tables()[1]
    Ms, v0, vT = (torch.ones_like(t) for t in sample(idx))
    counting = koi.semiring(
        zero=0.0, one=1.0, mul=torch.mul, sum=torch.sum, dsum=lambda x, dim: torch.ones_like(x)
    )
    assert koi.logZ_cu_sparse(Ms, idx, v0, vT, counting).tolist() == [8 * 3.0**7] * 3
    assert koi.fwd_scores_cu_sparse(Ms, idx, v0, counting)[-1].unique().tolist() == [3.0**7]


def test_scores_of_states_carry_no_gradient() -> None:
    idx = tables()[0]
    Ms, v0, vT = (t.requires_grad_() for t in sample(idx))
    assert not koi.fwd_scores_cu_sparse(Ms, idx, v0).requires_grad
    assert not koi.bwd_scores_cu_sparse(Ms, idx, vT).requires_grad


class Bases(koi.SequenceDist):
    """CTC-CRF written with koi's names, as a basecaller writes it."""

    def __init__(self, n_base: int, state_len: int) -> None:
        super().__init__()
        self.n_base, self.state_len = n_base, state_len
        self.idx = partita.debruijn_source(n_base, state_len).int()

    def logZ(self, scores: Tensor, S: koi.semiring = koi.Log) -> Tensor:
        Ms = scores.unflatten(2, self.idx.shape)
        free = Ms.new_full((Ms.shape[1], len(self.idx)), S.one)
        return koi.logZ_cu_sparse(Ms, self.idx, free, free, S)

    def ctc_loss(self, scores: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        bases, states = targets.clamp(min=1) - 1, targets.shape[1] - self.state_len + 1
        stay = sum(
            bases[:, i : i + states] * self.n_base ** (self.state_len - 1 - i)
            for i in range(self.state_len)
        ) * (self.n_base + 1)
        move = stay[:, 1:] + bases[:, : states - 1] + 1
        chosen = [scores.gather(2, index.expand(len(scores), -1, -1)) for index in (stay, move)]
        return self.logZ(scores) - koi.logZ_cu(*chosen, target_lengths - self.state_len + 1)


@devices
def test_a_basecaller_finds_the_loss_of_ctc_crf(device: str) -> None:
    model, g = Bases(4, 2), torch.Generator().manual_seed(0)
    scores = torch.randn(20, 3, 80, generator=g, dtype=torch.float64).to(device).requires_grad_()
    targets = torch.tensor(
        [[1, 2, 2, 2, 4, 1], [3, 3, 3, 3, 0, 0], [4, 1, 0, 0, 0, 0]], device=device
    )
    lengths = torch.tensor([6, 4, 2], device=device)
    theirs = model.ctc_loss(scores, targets, lengths)
    ours = partita.ctc_crf_loss(
        scores, targets, lengths, state_len=2, alphabet_size=5, reduction="none"
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss.sum(), scores)[0] for loss in (ours, theirs)),
        rtol=1e-10,
        atol=1e-12,
    )
    torch.testing.assert_close(
        model.posteriors(scores).sum(2), torch.ones(20, 3, dtype=torch.float64, device=device)
    )
    best = model.posteriors(scores, koi.Max)
    assert torch.equal(best.sum(2), torch.ones_like(best[..., 0]))
    assert set(best.unique().tolist()) == {0.0, 1.0}


def test_methods_that_a_subclass_does_not_define_raise() -> None:
    with pytest.raises(NotImplementedError):
        koi.SequenceDist().viterbi(torch.zeros(1))


@pytest.mark.gpu
def test_the_table_is_copied_to_the_device_once() -> None:
    """A table on the host is copied once, and again after it has changed."""
    idx = tables()[0]
    Ms, v0, vT = (t.cuda() for t in sample(idx, torch.float32))
    koi.logZ_cu_sparse(Ms, idx, v0, vT)
    with no_waits():
        before = koi.logZ_cu_sparse(Ms, idx, v0, vT)
    idx.copy_(idx.flip(1))
    assert not torch.equal(before, koi.logZ_cu_sparse(Ms, idx, v0, vT))


def test_lattices_that_are_refused_and_lengths_in_a_list() -> None:
    stay, move = torch.randn(5, 2, 3), torch.randn(5, 2, 2)
    listed = koi.logZ_cu(stay, move, [3, 2])  # type: ignore[arg-type]
    assert torch.equal(listed, koi.logZ_cu(stay, move, torch.tensor([3, 2])))
    for error, changes in {
        r"ValueError: stay_scores: expected shape \[T, N, L\], got \[2, 3\]": {"stay": stay[0]},
        "TypeError: stay_scores: expected a floating dtype": {"stay": stay.long()},
        r"ValueError: target_lengths: expected shape \[N\] = \[2\], got \[3\]": {
            "lengths": torch.tensor([3, 2, 1])
        },
    }.items():
        given = {"stay": stay, "move": move, "lengths": torch.tensor([3, 2]), **changes}
        with raises(error):
            koi.logZ_cu(*given.values())


def test_messages_name_the_arguments_of_koi() -> None:
    Ms, idx, ends = torch.zeros(4, 2, 3, 2), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 3)
    for call, message in (
        (lambda: koi.logZ_cu_sparse(Ms[0], idx, ends, ends), "Ms: expected shape"),
        (lambda: koi.logZ_cu_sparse(Ms, idx[:2], ends, ends), r"idx: .* \[C, K\] of Ms = \[3, 2\]"),
        (lambda: koi.logZ_cu_sparse(Ms, idx + 3, ends, ends), r"idx: .* got 3 at \[0, 0\]"),
        (lambda: koi.fwd_scores_cu_sparse(Ms, idx, ends[0]), r"v0: .* \[N, C\] of Ms = \[2, 3\]"),
        (lambda: koi.bwd_scores_cu_sparse(Ms, idx, ends[0]), r"vT: .* \[N, C\] of Ms = \[2, 3\]"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
