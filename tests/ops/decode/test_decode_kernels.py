"""The decoders' kernels against the reference, under the interpreter and on a GPU."""

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.decode import assert_same, batch
from helpers.rows import kernel_devices

import partita
from partita.ops.decode.gpu import plan


def searched(
    device: str,
    x: torch.Tensor,
    lengths: torch.Tensor,
    search: Callable[..., partita.Hypotheses] = partita.ctc_beam_search,
    tolerance: float = 1e-11,
    **options: object,
) -> None:
    """Compare a search of both backends."""
    with partita.backend("reference"):
        expected = search(x, lengths, **options)
    with partita.backend("triton"):
        found = search(x.to(device), lengths.to(device), **options)
    # On a GPU, the log-softmax of fp32 logits has a rounding of fp32.
    tolerance = tolerance if x.dtype == torch.float64 else 2e-6
    assert_same(partita.Hypotheses(*(t.cpu() for t in found)), expected, tolerance)


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize(
    ("T", "C", "width", "seed"), [(7, 4, 4, 0), (6, 5, 3, 1), (4, 12, 8, 2), (12, 3, 4, 3)]
)
def test_beam_search(T: int, C: int, width: int, seed: int, device: str) -> None:
    """Equal scores, impossible classes, prefixes that come back, and ragged lengths."""
    x, lengths = batch(T, 2, C, seed, round=seed == 1, forbidden=seed == 2)
    options = {"blank": seed % C, "from_logits": seed % 2 == 0}
    searched(device, x, lengths, beam_width=width, nbest=min(width, 3), **options)


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a beam of few candidates rank only those that can be among the best, as a wide one."""
    monkeypatch.setattr(plan, "FEW_CANDIDATES", 16)
    plan.beam_plan.cache_clear()
    yield
    plan.beam_plan.cache_clear()


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize("seed", [1, 4])
def test_beam_search_with_a_threshold_of_candidates(device: str, seed: int) -> None:
    """Some of the candidates are equal."""
    x, lengths = batch(5, 1, 9, seed, round=seed == 1)
    searched(device, x, lengths, beam_width=6, nbest=4, from_logits=True)


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.interpreted
@kernel_devices
def test_a_threshold_between_scores_of_both_signs(device: str) -> None:
    """Scores need not be normalized. The difference of the bits of such scores can overflow."""
    x, _ = batch(3, 1, 9, 0)
    searched(device, 3 * x, torch.tensor([3]), beam_width=6, nbest=4)


@pytest.mark.interpreted
@kernel_devices
def test_options_and_layouts_of_beam_search(device: str) -> None:
    x, lengths = batch(6, 2, 5, 7)
    batch_first = x.transpose(0, 1).contiguous().transpose(0, 1).log_softmax(-1).float()
    options = {"cutoff_top_n": 2, "blank_skip_threshold": 0.4}
    searched(device, batch_first, lengths, beam_width=3, **options)


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize(("T", "C", "seed"), [(7, 5, 0), (5, 70, 1), (4, 1200, 2), (30, 3, 3)])
def test_greedy_search(T: int, C: int, seed: int, device: str) -> None:
    x, lengths = batch(T, 3, C, seed, round=seed == 1, forbidden=seed == 2)
    options = {"blank": seed % C, "from_logits": seed % 2 == 0}
    for dtype in (torch.float64, torch.float32):
        searched(device, x.to(dtype), lengths, partita.ctc_greedy_search, 1e-12, **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.interpreted
@kernel_devices
def test_invalid_sequences_spoil_no_other(device: str) -> None:
    x = batch(4, 5, 4)[0].log_softmax(-1)
    x[3, 1, 2], x[0, 2, 0] = torch.nan, torch.inf
    lengths = torch.tensor([4, 4, 4, 5, -1])
    searched(device, x, lengths, beam_width=2)
    for from_logits in (False, True):
        searched(device, x, lengths, partita.ctc_greedy_search, 1e-12, from_logits=from_logits)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "N", "C", "width"),
    [(300, 8, 5, 16), (100, 8, 32, 32), (30, 4, 5000, 16), (40, 2, 300, 256)],
)
def test_real_sizes_on_a_gpu(T: int, N: int, C: int, width: int) -> None:
    """The kernels agree with the CPU, and two runs have the same bits."""
    x, lengths = batch(T, N, C, T)
    x = x.log_softmax(-1)
    expected = partita.ctc_beam_search(x, lengths, beam_width=width, nbest=4)
    runs = [
        partita.ctc_beam_search(x.cuda(), lengths.cuda(), beam_width=width, nbest=4)
        for _ in range(3)
    ]
    for found in runs:
        assert_same(partita.Hypotheses(*(t.cpu() for t in found)), expected, 1e-11)
        assert torch.equal(found.scores, runs[0].scores)


def test_extensions_that_are_formed() -> None:
    """All others have as many candidates before them as the beam has prefixes."""
    for width in (1, 2, 7, 16):
        pairs = set(plan.extension_pairs(width))
        for i in range(width):
            for k in range(width + 1):
                before = (i + 1) * (k + 1) - 1 - i - 1 + (k == 0)
                assert (i, k) in pairs or before >= width


@pytest.mark.parametrize("width", [1, 2, 16, 32, 33, 64, 256])
def test_plan_of_beam_search(width: int) -> None:
    found = plan.beam_plan(1000, width)
    assert width + found.pairs <= found.block_p <= 2048
    assert found.block_w >= max(width, 32 * found.num_warps)
    assert found.table_size >= 1.5 * 1000 * width
    assert found.table_size & (found.table_size - 1) == 0
