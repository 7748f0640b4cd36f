"""The kernels of CTC-CRF, each against plain PyTorch."""

from typing import Any

import pytest
import torch
from helpers.rows import INTERPRETING, kernel_devices
from torch.utils._python_dispatch import TorchDispatchMode

import partita
from partita.ops.ctc_crf import common

pytest.importorskip("triton")
from helpers.launches import recording

from partita.ops.ctc_crf.gpu import launch

# What the replay of a call may see besides launches: allocations, fills and views. Zeros and the
# ones that `full` makes are constants, which the CPU makes anew and a GPU keeps.
RECORDABLE = {"empty", "new_empty", "zeros", "full", "view", "_unsafe_view", "expand", "detach"}


def target_forms(device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return targets of 300 labels at most, by their form, with their lengths."""
    g = torch.Generator().manual_seed(0)
    targets, lengths = torch.randint(1, 4, (7, 300), generator=g), [300, 2, 1, 0, 40, 7, 9]
    packed = torch.cat([row[:length] for row, length in zip(targets, lengths, strict=True)])
    forms = {
        "padded": (targets, lengths),
        "transposed": (targets.T.contiguous().T, lengths),
        "bytes": (targets.to(torch.uint8), lengths),
        "packed": (packed.int(), lengths),
        "strided": (packed.repeat_interleave(3)[::3], lengths),
        "invalid": (targets.index_fill(1, torch.tensor(3), 4), [301, -1, 2, 3, 4, 2**40, -(2**40)]),
        "invalid packed": (packed, [3, -1, 2**62, 2**62, 4, 0, 1]),
    }
    return {
        name: (labels.to(device), torch.tensor(numbers).to(device))
        for name, (labels, numbers) in forms.items()
    }


@kernel_devices
@pytest.mark.parametrize("form", target_forms("cpu"))
def test_lattice(form: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lattice, lengths and scores agree with PyTorch; loops over labels take several turns."""
    monkeypatch.setattr(launch, "LATTICE_BLOCK", 64)
    targets, lengths = target_forms(device)[form]
    states, (T, N, C, A) = 130, (3, 7, 9, 4)
    scores = torch.randn(A, T, N, C).to(device).permute(1, 2, 3, 0)
    steps = torch.tensor([3, 2, 0, 1, -1, 4, 3]).to(device)
    tables = torch.zeros(C, A, device=device), common.lattice_source(states, device)
    for inputs in (steps, None):
        x = common.CRFInputs(scores, *tables, targets, lengths, inputs, state_len=2)
        ours, found = launch.build_lattice(x)
        theirs, expected = common.target_lattice(x)
        assert torch.equal(found, expected)
    invalid = expected < 0  # all inputs have T steps
    assert invalid.any() == form.startswith("invalid")
    assert ours.edge_index.min() >= -1 and ours.edge_index.max() < C * A
    assert torch.equal(ours.edge_index[~invalid], theirs.edge_index[~invalid])
    assert torch.equal(ours.initial, theirs.initial)
    assert torch.equal(ours.final[~invalid], theirs.final[~invalid])
    edge_scores = launch.gather_scores(scores, ours.edge_index, steps.clamp(0, T))
    expected_scores = common.lattice_scores(scores, ours.edge_index, steps)
    expected_scores = expected_scores.masked_fill(ours.edge_index < 0, 0.0)
    for n, length in enumerate(steps.clamp(0, T).tolist()):
        assert torch.equal(edge_scores[:length, n], expected_scores[:length, n])


@kernel_devices
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_subtraction_of_runs(
    dtype: torch.dtype, reduction: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs cover each edge once. Blocks of edges are smaller than a sequence's edges."""
    tile = {"ROWS": 2, "BLOCK": 16, "num_warps": 1}
    monkeypatch.setattr(launch, "ORDER_BLOCK", 16)
    monkeypatch.setattr(launch, "ROWS", 2)
    monkeypatch.setattr(launch, "tile_options", lambda E: tile)
    g, (T, N, C, A, L) = torch.Generator().manual_seed(0), (5, 3, 7, 3, 20)
    acc = torch.promote_types(dtype, torch.float32)
    edge_index = torch.randint(-1, C * A, (N, L, 2), generator=g).int()
    edge_index[2] = 4  # all edges read one score
    edge_index[:, 0, 1] = -1
    marginals = torch.rand(T, N, L, 2, generator=g, dtype=torch.float64).to(acc)
    dense = torch.randn(T, N, C, A, generator=g, dtype=torch.float64).to(acc)
    losses = torch.tensor([1.0, torch.inf, 2.0], dtype=torch.float64)
    target_lengths, lengths = torch.tensor([3, 0, 0]), torch.tensor([T, T, 3])
    grad = torch.tensor([2.0, 3.0, -0.5]) if reduction == "none" else torch.tensor(6.0)
    per_sequence = grad.double()
    if reduction == "mean":
        per_sequence = grad.double() / 3 / target_lengths.clamp(min=1)
    per_sequence = torch.where(losses == torch.inf, 0.0, per_sequence)
    unused = torch.empty(0, device=device)
    parts = losses, unused, unused, marginals.clone(), edge_index, lengths
    state = common.CRFState(*(part.to(device) for part in parts))
    coefficients, order = launch.sort_edges(
        grad.to(device), state, target_lengths.to(device), reduction
    )
    torch.testing.assert_close(coefficients.cpu(), per_sequence, rtol=1e-15, atol=0.0)
    expected_order = edge_index.flatten(1).sort(dim=1, stable=True).indices
    assert torch.equal(order.edges.cpu().long(), expected_order)
    assert torch.equal(order.runs.cpu().sum(1), (edge_index >= 0).flatten(1).sum(1))
    d_scores = dense.clone().to(device)
    result = launch.subtract_marginals(d_scores, coefficients, order, state, dtype)
    marginals[3:, 2] = 0.0  # the steps after the last one are left alone
    values = (marginals.double() * per_sequence[:, None, None]).masked_fill(edge_index < 0, 0.0)
    expected = dense.double().flatten(2)
    index = edge_index.long().clamp(min=0).flatten(1).expand(T, -1, -1)
    expected = expected.scatter_add(2, index, -values.flatten(2)).view(dense.shape)
    result = result.cpu().double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=eps, atol=64 * torch.finfo(acc).eps)


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_and_gradient_on_the_kernels(dtype: torch.dtype, reduction: str, device: str) -> None:
    """Reductions, dtypes and short targets agree with the reference, and N = 0 works."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 3, 9 * 4, generator=g).to(dtype).to(device)
    targets = torch.tensor([[2, 2, 2, 2], [1, 2, 3, 0], [1, 0, 0, 0]], device=device)
    sizes = {"state_len": 2, "alphabet_size": 4, "reduction": reduction}
    found = []
    for backend in ("triton", "reference"):
        x = scores.clone().requires_grad_()
        with partita.backend(backend):
            loss = partita.ctc_crf_loss(x, targets, [4, 3, 1], **sizes)
            detached = partita.ctc_crf_loss(x.detach(), targets, [4, 3, 1], **sizes)
            empty = partita.ctc_crf_loss(x[:, :0], targets[:0], [], **sizes)
        assert torch.equal(detached, loss.detach())
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        (grad,) = torch.autograd.grad(loss, x, torch.full_like(loss, 0.75))
        assert grad.dtype == dtype and (grad[:, 2] == 0).all()
        found.append((loss.detach(), grad, empty.detach()))
    eps, bound = torch.finfo(dtype).eps, 1e-6 if dtype.itemsize < 8 else 1e-10
    torch.testing.assert_close(found[0][0], found[1][0], rtol=bound, atol=0.0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=eps, atol=bound)
    torch.testing.assert_close(found[0][2], found[1][2], equal_nan=True)


class Seen(TorchDispatchMode):
    """Notes the names of the functions that PyTorch's dispatcher runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(INTERPRETING, reason="the launches are recorded, not run")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_call_is_launches_and_no_arithmetic(dtype: torch.dtype, reduction: str) -> None:
    """The GPU functions only allocate and launch, so that a call can be replayed."""
    scores = torch.zeros(6, 2, 4 * 5, dtype=dtype)
    tables = (common.kmer_source(4, 1), common.lattice_source(4))
    targets, lengths = torch.ones(2, 4, dtype=torch.int64), torch.full((2,), 4)
    sequences = (targets, lengths, lengths)
    grad = torch.ones(2 if reduction == "none" else ())
    inputs = common.CRFInputs(scores, *tables, *sequences, 1)
    with recording([], "13.0"):
        launch.crf_loss(inputs, reduction, True)  # builds the tables of edges
        with Seen() as seen:
            state = common.CRFState(*launch.crf_loss(inputs, reduction, True)[1:])
            launch.crf_gradient(grad, scores, tables[0], lengths, state, reduction)
    assert seen.names <= RECORDABLE
