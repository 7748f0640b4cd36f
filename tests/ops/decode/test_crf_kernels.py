"""The kernels of CTC-CRF's decoding against the reference, under the interpreter and on a GPU."""

import pytest
import torch
from helpers.ctc import NEEDS_NUMBA
from helpers.rows import KERNEL_DEVICES, kernel_devices
from torch import Tensor

import partita
from partita.ops.decode import reference, registered
from partita.ops.decode.gpu import plan


def batch(T: int, N: int, bases: int, k: int, seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return scores `[T, N, C, A]` in fp64 and lengths `[N]`, of which the first is T."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(T, N, bases**k, bases + 1, generator=g, dtype=torch.float64) * scale
    lengths = torch.randint(0, T + 1, (N,), generator=g)
    lengths[0] = T
    return scores, lengths


def searched(device: str, scores: Tensor, lengths: Tensor, bases: int, k: int, width: int) -> None:
    """Compare the beam search of the kernels with the reference, on the same scores."""
    from partita.ops.decode.gpu.launch_crf import ctc_crf_beam_search

    with partita.backend("reference"):
        chain = partita.Chain(scores, partita.debruijn_source(bases, k), lengths=lengths)
        later = chain.backward_scores()
    expected = reference.ctc_crf_beam_search(scores, later, lengths, width)
    inputs = (scores.to(device), later.to(device), lengths.to(device), width)
    for found in (ctc_crf_beam_search(*inputs), ctc_crf_beam_search(*inputs)):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize(
    ("T", "bases", "k", "width", "seed", "kind"),
    [
        (5, 2, 2, 3, 0, ""),
        (5, 2, 2, 4, 1, "ties"),
        (4, 2, 2, 4, 2, "flat"),
        (6, 2, 2, 3, 3, "forbidden"),
        (3, 1, 2, 3, 4, ""),
        (3, 3, 1, 40, 5, "ties"),  # more prefixes than there are
        (2, 4, 3, 2, 6, "ties"),  # the first k-mers come in several blocks
        (3, 2, 2, 3, 7, "signs"),  # the difference of the bits of two ranks can overflow
    ],
)
def test_beam_search(
    T: int, bases: int, k: int, width: int, seed: int, kind: str, device: str
) -> None:
    """Equal scores, impossible edges, ragged lengths, and wide beams."""
    scores, lengths = batch(T, 2, bases, k, seed, 2.0)
    if kind == "ties":
        scores = scores.round()
    if kind == "signs":
        scores = 9 * (scores - scores.mean((0, 2, 3), keepdim=True) - 2.5)
    if kind == "flat":
        scores = torch.zeros_like(scores)
    if kind == "forbidden":
        scores = scores.masked_fill(scores < -1.5, -torch.inf)
        scores[1, 1] = -torch.inf
    searched(device, scores, lengths, bases, k, width)


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize("hash_mask", [-1, 1])
def test_prefixes_are_merged_by_their_bases(
    hash_mask: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix comes back to a beam that has its extension; with one bit most hashes are equal."""
    from partita.ops.decode.gpu import launch_crf

    monkeypatch.setattr(launch_crf, "HASH_MASK", hash_mask)
    scores, _ = batch(10, 1, 2, 2, 25, 2.0)  # without a merge, another path is the best one
    searched(device, scores, torch.tensor([10]), 2, 2, 6)


def called(
    backend: str, device: str, marginals: Tensor, path: tuple[Tensor, ...], k: int
) -> partita.Basecalls:
    """Return the bases of paths; the marginals stay as they lie in memory."""
    marginals, *rest = (t.to(device) for t in (marginals, *path))
    posteriors = registered.crf_base_posteriors(marginals, rest[-1], backend)
    found = registered.crf_calls(*posteriors, *rest, k, marginals.dtype, backend)
    return partita.Basecalls(*(t.cpu() for t in found))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "N", "bases", "k", "width"),
    [(500, 8, 4, 5, 32), (300, 4, 4, 3, 5), (60, 2, 4, 4, 256), (40, 2, 30, 1, 100)],
)
def test_real_sizes_on_a_gpu(T: int, N: int, bases: int, k: int, width: int) -> None:
    """The kernels find the paths of the CPU, and all runs have the same bits."""
    from partita.ops.decode.gpu.launch_crf import ctc_crf_beam_search

    scores, lengths = batch(T, N, bases, k, T, 2.0)
    chain = partita.Chain(scores, partita.debruijn_source(bases, k), lengths=lengths)
    later = chain.backward_scores()
    source = partita.debruijn_source(bases, k)
    expected = registered.crf_path(scores, source, lengths, width, "auto")[:2]
    inputs = scores.cuda(), later.cuda(), lengths.cuda(), width
    for _ in range(3):
        for a, b in zip(ctc_crf_beam_search(*inputs), expected, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.interpreted
@kernel_devices
def test_calls_are_those_of_the_reference(device: str) -> None:
    """The whole of the decoder, from fp32 scores in another order of memory."""
    scores, lengths = batch(4, 2, 2, 2, 9, 2.0)
    scores = scores.float().transpose(0, 1).contiguous().transpose(0, 1)
    for method in ("viterbi", "beam"):
        options = {"state_len": 2, "alphabet_size": 3, "method": method, "beam_width": 4}
        with partita.backend("reference"):
            expected = partita.ctc_crf_decode(scores, input_lengths=lengths, **options)
        with partita.backend("triton"):
            found = partita.ctc_crf_decode(
                scores.to(device), input_lengths=lengths.to(device), **options
            )
        for name, a, b in zip(found._fields, found, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize(
    ("T", "N", "bases", "C", "columns"),
    [
        (5, 3, 1, 1, 1),
        (3, 5, 2, 4, 4),
        (4, 5, 2, 32, 8),
        (5, 4, 4, 256, 64),
        (2, 3, 4, 1024, 256),
        (3, 3, 3, 243, 243),  # the columns come in several blocks
        (3, 3, 5, 25, 25),
        (2, 2, 7, 343, 343),
    ],
)
def test_sums_of_posteriors_by_base(
    T: int, N: int, bases: int, C: int, columns: int, device: str
) -> None:
    """Ragged and invalid lengths, posteriors of 0, and NaN in what is not read."""
    from partita.ops.chain.gpu.launch_paths import PosteriorBuffers
    from partita.ops.decode.gpu.launch_crf import sum_state_posteriors

    g = torch.Generator().manual_seed(T)
    lengths = torch.tensor([T, T - 1, 0, -1, T + 1])[:N]
    posteriors = torch.rand(T + 1, N, columns, generator=g)
    first = torch.rand(N, C, generator=g)
    posteriors[1, 0], first[1] = 0.0, 0.0
    steps = torch.where((lengths < 0) | (lengths > T), 0, lengths)
    posteriors[torch.arange(T + 1)[:, None] > steps] = posteriors[0] = torch.nan
    first[steps == 0] = torch.nan
    sums = posteriors[1:].double().nan_to_num().unflatten(2, (-1, bases)).sum(2)
    expected = (sums / sums.sum(2, keepdim=True)).nan_to_num()
    unused = torch.empty(0, dtype=torch.int64), torch.empty(0)
    buffers = PosteriorBuffers(*unused, posteriors.to(device), first.to(device))
    by_base = torch.full((T, N, bases), torch.nan, dtype=torch.float64, device=device)
    first_sums = torch.full((N, C), torch.nan, dtype=torch.float64, device=device)
    sum_state_posteriors(buffers, lengths.to(device), by_base, first_sums)
    torch.testing.assert_close(by_base.cpu(), expected, rtol=1e-14, atol=0)
    scaled = first.double() / first.double().sum(1, keepdim=True)
    scaled = torch.where((steps > 0)[:, None], scaled.nan_to_num(), 1 / C)
    torch.testing.assert_close(first_sums.cpu(), scaled, rtol=1e-14, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "dtype", "bases", "k"),
    [
        *(
            ("viterbi", torch.float16, *table)
            for table in ((1, 1), (2, 3), (2, 5), (2, 10), (3, 5), (4, 3), (4, 5), (5, 2), (7, 3))
        ),
        ("viterbi", torch.float32, 4, 5),
        ("viterbi", torch.bfloat16, 4, 5),
        *(("beam", torch.float32, *table) for table in ((1, 1), (2, 10), (4, 3), (4, 5), (7, 3))),
    ],
)
def test_qualities_on_a_gpu(method: str, dtype: torch.dtype, bases: int, k: int) -> None:
    """Qualities of all ways to sum posteriors, as on the CPU, and the same bits twice."""
    scores, lengths = batch(60, 5, bases, k, 3, 2.0)
    lengths[1:4] = torch.tensor([1, 0, 37])
    scores = scores.to(dtype)
    scores[20, 4, 0] = -torch.inf
    scores[30, 3] = -torch.inf  # no path
    options = {"state_len": k, "alphabet_size": bases + 1, "method": method, "beam_width": 8}
    exact = partita.ctc_crf_decode(scores.double(), input_lengths=lengths, **options)
    inputs = scores.cuda(), {"input_lengths": lengths.cuda(), **options}
    found, second = (partita.ctc_crf_decode(inputs[0], **inputs[1]) for _ in range(2))
    for name, a, b, c in zip(found._fields, found, second, exact, strict=True):
        assert torch.equal(a, b), name
        torch.testing.assert_close(a.cpu().to(c.dtype), c, rtol=2e-5, atol=2e-5, msg=name)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("backend", "device"),
    [
        *(pytest.param("triton", *device.values, marks=device.marks) for device in KERNEL_DEVICES),
        pytest.param("numba", "cpu", marks=NEEDS_NUMBA),
    ],
)
@pytest.mark.parametrize(("bases", "k", "seed"), [(2, 2, 0), (4, 3, 1), (1, 1, 2), (3, 1, 3)])
def test_bases_of_paths(bases: int, k: int, seed: int, backend: str, device: str) -> None:
    """Ragged, empty, invalid and impossible sequences, and marginals in another order."""
    scores, _ = batch(7, 5, bases, k, seed, 2.0)
    scores[2, 4] = -torch.inf
    lengths = torch.tensor([7, 3, 0, 8, 7])
    with partita.backend("reference"):
        chain = partita.Chain(scores, partita.debruijn_source(bases, k), lengths=lengths)
        marginals, best = chain.marginals(), chain.viterbi()
    path = best.states, best.edges, lengths
    for dtype in (torch.float64, torch.float32):
        rounded = marginals.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
        expected = called("reference", device, rounded, path, k)
        assert expected.lengths[1] >= k == expected.lengths[2]
        assert expected.lengths[3:].tolist() == [0, 0]
        for found in (called(backend, device, rounded, path, k) for _ in range(2)):
            for name, a, b in zip(found._fields, found, expected, strict=True):
                tolerance = 1e-12 if a.dtype == torch.float64 else 1e-6
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(("bases", "width"), [(1, 1), (4, 5), (4, 32), (4, 256), (59, 256)])
def test_plan_of_beam_search(bases: int, width: int) -> None:
    found = plan.kmer_beam_options(bases, width)
    block_w, block_p = found["BLOCK_W"], found["BLOCK_P"]
    assert block_w >= width and block_p >= 2 * bases * block_w
    assert block_w % found["BLOCK_J"] == 0
    assert block_p < 2**16  # so that two counts fit in a word
