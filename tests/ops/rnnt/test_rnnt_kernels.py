"""The kernels of transducers against the reference, under the interpreter and on a GPU."""

import math
from typing import Any

import pytest
import torch
from helpers.rnnt import Lattices, lattices
from helpers.rows import KERNEL_DEVICES, kernel_devices
from torch import Tensor

import partita
from partita.ops.rnnt.autograd import linear_rnnt
from partita.ops.rnnt.gpu.plan import MARGIN, lattice_plan, row_tile
from partita.testing import poisoned_memory

TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-6, torch.float64: 1e-7}


def rnnt(x: Lattices, backend: str, blank: int, **options: Any) -> list[Tensor]:
    """Return the losses of RNN-T and their gradient in the tokens."""
    tokens = x.tokens.detach().requires_grad_()
    with partita.backend(backend), poisoned_memory():
        losses = partita.rnnt_loss(tokens, *x[2:], blank, reduction="none", **options)
        upstream = torch.arange(len(losses), device=losses.device) + 1.0
        return [losses, *torch.autograd.grad(losses, tokens, upstream.to(losses.dtype))]


def tdt(x: Lattices, backend: str, durations: list[int]) -> list[Tensor]:
    """Return the losses of a TDT and their gradients in tokens and durations."""
    inputs = [each.detach().requires_grad_() for each in x[:2]]
    with partita.backend(backend), poisoned_memory():
        losses = partita.tdt_loss(*inputs, *x[2:], 0, durations, 0.05, reduction="none")
        upstream = torch.arange(len(losses), device=losses.device) + 1.0
        return [losses, *torch.autograd.grad(losses, inputs, upstream.to(losses.dtype))]


def assert_all_close(found: Any, expected: Any, dtype: torch.dtype) -> None:
    for one, other in zip(found, expected, strict=True):
        tolerance = TOLERANCE[dtype if one.dtype == dtype else torch.float32]
        torch.testing.assert_close(
            one.double(), other.double(), rtol=tolerance, atol=4 * tolerance, equal_nan=True
        )


# One chunk of u and two; rows that are aligned, that start at any address, and that take two loads.
SHAPES = [(2, 5, 3, 7), (1, 2, 34, 5), (2, 2, 2, 301), (1, 2, 1, 2600), (2, 1, 0, 4)]


CASES = [
    *((shape, torch.float32) for shape in SHAPES),
    *((SHAPES[2], dtype) for dtype in TOLERANCE if dtype != torch.float32),
]


@kernel_devices
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_losses_and_gradients_of_rnnt(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    blank = shape[3] - 1
    x = lattices(shape, device, dtype, blank)
    expected = rnnt(x, "reference", blank)
    assert_all_close(rnnt(x, "triton", blank), expected, dtype)
    with torch.no_grad(), partita.backend("triton"):
        losses = partita.rnnt_loss(x.tokens, *x[2:], blank, reduction="none")
    torch.testing.assert_close(losses, expected[0].detach(), rtol=1e-6, atol=1e-6)


@kernel_devices
@pytest.mark.parametrize(
    "options",
    [
        {"hat": True, "delay_penalty": 0.1},
        {"clamp": 0.1, "fastemit_lambda": 0.5},
        {"hat": True, "clamp": 0.1},
        {"fused_log_softmax": False, "clamp": 0.1},
    ],
    ids=str,
)
def test_options_of_rnnt(options: dict[str, Any], device: str) -> None:
    x = lattices((2, 4, 2, 6), device, blank=2)
    if not options.get("fused_log_softmax", True):
        x = x._replace(tokens=x.tokens.log_softmax(-1))
    found, expected = rnnt(x, "triton", 2, **options), rnnt(x, "reference", 2, **options)
    assert_all_close(found, expected, torch.float32)


@kernel_devices
def test_strides_and_a_gradient_in_place(device: str) -> None:
    x = lattices((2, 4, 3, 8), device)
    expected = rnnt(x, "triton", 0)
    turned = x._replace(tokens=x.tokens.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0))
    assert_all_close(rnnt(turned, "triton", 0), expected, torch.float32)
    leaf = x.tokens.detach().requires_grad_()
    with partita.backend("triton"):
        losses = partita.rnnt_loss(leaf + 0.0, *x[2:], 0, reduction="none", inplace=True)
    (grad,) = torch.autograd.grad(losses, leaf, torch.arange(2, device=device) + 1.0)
    assert torch.equal(grad, expected[1])


@kernel_devices
def test_logits_far_from_zero(device: str) -> None:
    """An offset changes neither losses nor gradients by more than its rounding."""
    x = lattices((2, 4, 3, 300), device)
    x = x._replace(tokens=(x.tokens * 1024).round() / 1024)  # so that the offset is exact
    for scale, offset in ((1.0, 8192.0), (2.0, 2.0**24)):
        tokens = x.tokens if scale == 1.0 else (x.tokens / scale).round() * scale
        found = rnnt(x._replace(tokens=tokens + offset), "triton", 0)
        for one, other in zip(found, rnnt(x._replace(tokens=tokens), "reference", 0), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@kernel_devices
@pytest.mark.parametrize("value", [-1e10, torch.finfo(torch.float32).min])
def test_losses_of_nodes_whose_logits_are_all_far_from_zero(value: float, device: str) -> None:
    """The products of huge logits with log2(e) have not the digits of differences."""
    x = lattices((1, 3, 1, 70), device)
    x.tokens[0, 1], x.durations[0, 0, 0] = value, value
    found, expected = [], []
    for losses, backend in ((found, "triton"), (expected, "reference")):
        with torch.no_grad(), partita.backend(backend):
            losses.append(partita.rnnt_loss(x.tokens, *x[2:], 0))
            losses.append(partita.tdt_loss(*x, 0, [0, 1, 2]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@kernel_devices
@pytest.mark.parametrize(
    ("durations", "dtype"),
    [
        ([0, 1, 2, 3, 4], torch.float32),
        ([1, 0], torch.float32),
        ([0, 1, 2, 3, 4], torch.float64),
        ([1], torch.float64),
        ([2, 1], torch.float64),
        ([0, 1], torch.float32),  # the rows before a kind of arcs do not count, as for blanks of 0
    ],
)
def test_losses_and_gradients_of_tdt(durations: list[int], dtype: torch.dtype, device: str) -> None:
    shape = {(1, 0): (1, 4, 33, 6), (0, 1): (2, 2, 1, 4)}.get(tuple(durations), (2, 5, 3, 6))
    x = lattices(shape, device, dtype, K=len(durations))
    expected = tdt(x, "reference", durations)
    found = tdt(x, "triton", durations)
    if dtype == torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    else:
        assert_all_close(found, expected, dtype)
    assert expected[0].isfinite().any() and expected[1].abs().sum() > 0


@kernel_devices
def test_scans_write_no_rows_of_other_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a scan may have more rows than its chunk."""
    from partita.ops.rnnt.gpu import launch

    T, U, new_scan, found = 8, 31, launch.new_scan, []

    def unwritten_states(*args: Any) -> Any:
        scan = new_scan(*args)
        assert scan.states is not None
        found.append(scan.states.zero_())
        return scan

    monkeypatch.setattr(launch, "new_scan", unwritten_states)
    plan, x = lattice_plan(1, T, U + 1), lattices((1, T, U, 5), device, K=5)
    tdt(x, "triton", [0, 1, 2, 3, 4])
    assert plan.rows == T + U + 1  # A row beyond these would be one of the next sequence.
    assert found[0][:, : plan.rows * 32].all()  # No word of a state is 0.
    assert not found[0][:, plan.rows * 32 :].any()


@kernel_devices
@pytest.mark.parametrize("shape", [(3, 8, 31, 5), (1, 8, 33, 5), (1, 8, 70, 5)], ids=str)
def test_chunks_without_rows_between_them(shape: tuple[int, int, int, int], device: str) -> None:
    x = lattices(shape, device, K=3)
    x = x._replace(tokens=x.tokens.nan_to_num(), durations=x.durations.nan_to_num())
    x.steps[:], x.labels[:] = shape[1], shape[2]
    expected = tdt(x, "reference", [0, 1, 2])
    assert_all_close(tdt(x, "triton", [0, 1, 2]), expected, torch.float32)
    paths = []
    for backend in ("triton", "reference"):
        with partita.backend(backend):
            paths.append(partita.rnnt_align(x.tokens, *x[2:], 0).steps)
            paths.append(partita.tdt_align(*x, 0, [0, 1, 2]).steps)
    assert torch.equal(paths[0], paths[2]) and torch.equal(paths[1], paths[3])


@kernel_devices
def test_best_paths(device: str) -> None:
    for x in (lattices((2, 5, 3, 6), device), lattices((1, 1, 33, 5), device)):
        found = []
        for backend in ("triton", "reference"):
            with partita.backend(backend):
                found.append(partita.rnnt_align(x.tokens, *x[2:], 0))
                found.append(partita.tdt_align(*x, 0, [0, 1, 2], 0.05))
        for one, other in zip(found[:2], found[2:], strict=True):
            assert torch.equal(one.steps, other.steps)
            torch.testing.assert_close(tuple(one[1:]), tuple(other[1:]), rtol=1e-6, atol=1e-6)


@kernel_devices
def test_scores_that_are_no_log_probabilities(device: str) -> None:
    """Words of arcs hold scores far above 0, as logits of a model without a softmax may be."""
    x = lattices((2, 5, 3, 7), device)
    options: dict[str, Any] = {"fused_log_softmax": False}
    x = x._replace(tokens=1e4 * x.tokens)
    expected = rnnt(x, "reference", 0, **options)
    assert (expected[0] < -1e4).any()
    torch.testing.assert_close(rnnt(x, "triton", 0, **options), expected, rtol=1e-6, atol=1e-3)
    x.tokens[0, 2, 1] = 1e7  # above what a word holds
    assert rnnt(x, "triton", 0, **options)[0].isnan().tolist() == [True, False]


@kernel_devices
def test_equal_paths_are_chosen_as_by_the_reference(device: str) -> None:
    x = lattices((1, 4, 2, 4), device)
    x = x._replace(tokens=torch.zeros_like(x.tokens), durations=torch.zeros_like(x.durations))
    for durations in ([0, 1, 2], [2, 1, 0]):
        steps = []
        for backend in ("triton", "reference"):
            with partita.backend(backend):
                steps.append(partita.tdt_align(*x, 0, durations).steps)
        assert torch.equal(*steps)


@kernel_devices
def test_nan_stays_in_its_sequence(device: str) -> None:
    """Arcs of long durations read rows that belong to other arcs of the last sequence."""
    x = lattices((2, 2, 1, 3), device, K=2)
    x.tokens[1] = math.nan
    x.labels[:], x.steps[:] = 1, 2
    expected = tdt(x, "reference", [1, 40])
    found = tdt(x, "triton", [1, 40])
    assert found[0][1].isnan() and found[0][0].isfinite()
    assert_all_close([each[:1] for each in found], [each[:1] for each in expected], torch.float32)


@kernel_devices
def test_nan_in_any_node_reaches_the_score_of_the_best_path(device: str) -> None:
    for t, u in ((0, 1), (1, 0)):
        x = lattices((1, 2, 2, 3), device)
        x.tokens[0, t, u, 0] = math.nan
        with partita.backend("triton"):
            for found in (
                partita.rnnt_align(x.tokens, *x[2:], 0),
                partita.tdt_align(*x, 0, [0, 1, 2]),
            ):
                assert found.score.isnan().all() and found.scores.isnan().all()
                assert (found.steps == -1).all()


@pytest.mark.usefixtures("unchecked")
@kernel_devices
def test_invalid_sequences_and_no_steps(device: str) -> None:
    x = lattices((5, 3, 2, 6), device)
    x.targets[0, 0], x.targets[1, 0] = 0, 6
    x.steps[2], x.labels[3], x.steps[4] = 4, 3, 0
    x.labels[:2] = 2
    with partita.backend("triton"):
        steps, _, score = partita.rnnt_align(x.tokens, *x[2:], 0)
    for found in (rnnt(x, "triton", 0), tdt(x, "triton", [0, 1, 2])):
        assert found[0][:4].isnan().all() and found[0][4] == math.inf
        for grad in found[1:]:
            assert grad[:4].isnan().all() and not grad[4].any()
    assert (steps == -1).all() and score[:4].isnan().all() and score[4] == -math.inf


@kernel_devices
@pytest.mark.parametrize(
    ("name", "activation", "chunk", "keep_logits"),
    [("rnnt", "relu", 3, False), ("rnnt", "tanh", 8, True), ("tdt", "sigmoid", 100, False)],
)
def test_chunks_of_the_joint(
    name: str, activation: str, chunk: int, keep_logits: bool, device: str
) -> None:
    """Chunks of steps and of sequences give the gradients of the reference."""
    g = torch.Generator().manual_seed(0)
    x, D = lattices((3, 4, 2, 9), "cpu"), 10
    shapes = [(3, 4, D), (3, 3, D), (9, D), (9,), (3, D), (3,)]
    tensors = [torch.randn(shape, generator=g) for shape in shapes]
    for b in range(3):
        tensors[0][b, x.steps[b] :], tensors[1][b, x.labels[b] + 1 :] = math.nan, math.nan
    tensors = tensors if name == "tdt" else tensors[:4]
    results = []
    for backend in ("triton", "reference"):
        where = "cpu" if backend == "reference" else device
        inputs = [each.to(where) for each in (*tensors, *x[2:])]
        factor = torch.tensor([0.5, 1.0, 0.0], device=where)
        results.append(linear(name, inputs, factor, activation, chunk, keep_logits, backend))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


def linear(
    name: str,
    inputs: list[Any],
    factor: Tensor,
    activation: str,
    chunk: int,
    keep_logits: bool,
    backend: str,
) -> Any:
    """Call the op of a loss from encoder and predictor."""
    options: tuple[Any, ...] = ([0, 1, 2], True, False, 0.05, 0.0, 0.0)
    if name == "rnnt":
        inputs, options = [*inputs[:4], None, None, *inputs[4:]], ([], True, False, 0.0, 0.1, 0.2)
    inputs = [*inputs[:6], None, None, *inputs[6:]]
    wanted = [each is not None for each in inputs[:8]]
    rest = (activation, 0, *options, chunk, keep_logits, False, wanted, backend)
    return linear_rnnt(*inputs, factor, *rest)


def test_the_tiles_of_rows() -> None:
    assert row_tile(1025, 2, 2, True)[:3] == (8, True, 256)
    assert row_tile(1025, 4, 4, True)[:3] == (4, True, 128)
    assert row_tile(1025, 2, 2, False)[:2] == (1, False)
    assert row_tile(500, 2, 8, True)[:2] == (4, False)
    assert row_tile(1024, 4, 16, True)[:2] == (4, False)
    for V in (1, 30, 1025, 5000):
        for itemsize in (2, 4, 8):
            tile = row_tile(V, itemsize, itemsize, True)
            assert 1 <= tile.pieces * tile.block <= 40 * 32 and tile.block * itemsize <= 512


@pytest.mark.parametrize("V", [1, 30, 128, 129, 1000, 1024, 1025, 1040, 1060, 5000])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_the_columns_of_a_sum_do_not_depend_on_the_alignment(V: int, itemsize: int) -> None:
    tiles = [row_tile(V, itemsize, 2**i) for i in range(5) if 2**i >= itemsize]
    assert len({tile[1:4] for tile in tiles}) == 1
    assert [tile.vector for tile in tiles] == sorted(tile.vector for tile in tiles)
    vector, edges, block, pieces, _ = tiles[-1]
    columns = V // block * block if edges else V
    assert columns % vector == 0 and V - columns <= 32 and pieces * block <= 40 * 32


def test_the_rows_of_a_chunk_cover_the_last_block_of_both_scans() -> None:
    for T in range(1, 40):
        plan = lattice_plan(2, T, 33)
        assert plan.num_chunks == 2 and plan.rows % 8 == 0 and plan.rows >= T + 32
        assert plan.nodes == 2 * 2 * plan.rows * 32 + MARGIN and T <= plan.carry_steps <= plan.rows


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_many_chunks_are_the_same_each_time(device: str) -> None:
    """Programs that wait for their neighbors give the same bits whatever their order."""
    x = lattices((16, 60, 130, 33), device, torch.bfloat16)
    for run in (lambda: rnnt(x, "triton", 0), lambda: tdt(x, "triton", [0, 1, 2])):
        first = run()
        assert all(all(map(torch.equal, run(), first)) for _ in range(5))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_classes_may_lie_more_than_2_31_elements_apart(device: str) -> None:
    stride = 1_100_000_000
    memory = torch.empty(2 * stride + 16, dtype=torch.float16, device=device)  # mostly untouched
    logits = memory.as_strided((1, 2, 1, 3), (6, 2, 1, stride))
    logits.copy_(torch.arange(6.0).view(1, 2, 1, 3) % 4)
    x = (torch.empty(1, 0, dtype=torch.int64, device=device), [2], [0], 0)
    with partita.backend("triton"):
        loss = partita.rnnt_loss(logits, *x)
    with partita.backend("reference"):
        torch.testing.assert_close(loss, partita.rnnt_loss(logits.contiguous(), *x))
