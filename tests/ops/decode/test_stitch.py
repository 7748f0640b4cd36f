"""Joining the base calls of chunks, against the decode of the whole read."""

from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.memory import no_waits
from torch import Tensor

import partita
from partita import Basecalls, stitch

BASES = 4


def read_of(T: int, k: int, certainty: float, seed: int = 0) -> Tensor:
    """Return scores `[T, 1, C, A]` with noise, in which a random path stands out."""
    g = torch.Generator().manual_seed(seed)
    C = BASES**k
    scores = torch.randn(T, 1, C, BASES + 1, generator=g)
    state = int(torch.randint(C, (), generator=g))
    for t in range(T):
        column = 0
        if torch.rand((), generator=g) < 0.4:
            column = 1 + state // BASES ** (k - 1)  # the base that the move drops
            state = state * BASES % C + int(torch.randint(BASES, (), generator=g))
        scores[t, 0, state, column] += certainty
    return scores


def decoded_in_chunks(scores: Tensor, T: int, overlap: int, **options: Any) -> Basecalls:
    stride, L = T - overlap, len(scores)
    N = 1 + max(0, -(-(L - T) // stride))
    missing = (N - 1) * stride + T - L
    padded = torch.cat([scores, scores.new_full((missing, *scores.shape[1:]), 5.0)])
    chunks = torch.cat([padded[n * stride : n * stride + T] for n in range(N)], 1)
    calls = partita.ctc_crf_decode(
        chunks, alphabet_size=BASES + 1, input_lengths=[T] * (N - 1) + [T - missing], **options
    )
    return stitch(calls, overlap, length=L)


@pytest.mark.parametrize("method", ["viterbi", "posterior", "beam"])
@pytest.mark.parametrize(("k", "L", "overlap"), [(1, 610, 40), (3, 573, 41), (3, 90, 30)])
def test_a_clear_read_in_chunks_is_the_whole_read(
    method: str, k: int, L: int, overlap: int
) -> None:
    scores = read_of(L, k, certainty=15.0)
    options = {"state_len": k, "method": method, "beam_width": 8}
    whole = partita.ctc_crf_decode(scores, alphabet_size=BASES + 1, **options)
    found = decoded_in_chunks(scores, 100, overlap, **options)
    assert whole.lengths > L // 3
    for name, a, b in zip(whole._fields, found, whole, strict=True):
        if name == "log_probs":
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(a, b), name
    assert found.to_fastq(["read"]).splitlines()[:2] == ["@read", whole.to_string()[0]]


@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_read_is_the_whole_read_too(seed: int) -> None:
    """The paths of chunks differ at the ends of chunks alone, and the cuts leave the ends out."""
    scores, options = read_of(600, 3, certainty=1.0, seed=seed), {"state_len": 3}
    whole = partita.ctc_crf_decode(scores, alphabet_size=BASES + 1, **options)
    found = decoded_in_chunks(scores, 100, 50, **options)
    assert torch.equal(found.steps, whole.steps) and torch.equal(found.labels, whole.labels)


def calls_of(T: int, *chunks: tuple[int, dict[int, int]]) -> Basecalls:
    """Return calls of single bases: the first of each chunk, and the base of each step's move."""
    N, S = len(chunks), T + 1
    labels, steps = torch.zeros(N, S, dtype=torch.int64), torch.full((N, S), -1)
    moves = torch.zeros(N, T, dtype=torch.bool)
    for n, (first, moved) in enumerate(chunks):
        labels[n, : 1 + len(moved)] = torch.tensor([first, *moved.values()])
        steps[n, 1 : 1 + len(moved)] = torch.tensor([*moved])
        moves[n, [*moved]] = True
    lengths = torch.tensor([1 + len(moved) for _, moved in chunks])
    # The log-probability names the chunk and the base.
    log_probs = -(10.0 * torch.arange(1, N + 1)[:, None] + torch.arange(S))
    valid = torch.arange(S) < lengths[:, None]
    return Basecalls(labels, lengths, log_probs * valid, steps, moves)


def bases_and_steps(calls: Basecalls) -> tuple[str, list[int]]:
    return calls.to_string()[0], calls.steps[0, : int(calls.lengths[0])].tolist()


def test_the_middle_of_the_overlap_without_a_common_base() -> None:
    calls = calls_of(8, (1, {2: 2, 5: 3, 7: 2}), (4, {1: 1, 3: 4, 6: 1}))
    found = stitch(calls, 4)  # steps 4 to 7 are shared, and 6 is the middle
    assert bases_and_steps(found) == ("ACGTA", [-1, 2, 5, 7, 10])
    assert found.moves[0].nonzero()[:, 0].tolist() == [2, 5, 7, 10]
    assert found.log_probs[0, :6].tolist() == [-10.0, -11.0, -12.0, -22.0, -23.0, 0.0]
    assert found.labels.shape == found.steps.shape == (1, 13) and found.moves.shape == (1, 12)


@pytest.mark.parametrize(("first", "second"), [(7, 9), (9, 7)], ids=["twofold", "missing"])
def test_a_cut_where_the_chunks_agree(first: int, second: int) -> None:
    """One chunk has moved before the middle of the overlap, and the other moves after it."""
    calls = calls_of(10, (1, {6: 2, first: 3}), (1, {0: 2, second - 6: 3, 7: 4}))
    found = stitch(calls, 4)  # steps 6 to 9 are shared, and 8 is the middle
    assert bases_and_steps(found) == ("ACGT", [-1, 6, second, 13])


def test_repeats_that_the_chunks_time_differently() -> None:
    """A cut at a common base alone would call the second base of the repeat two times."""
    calls = calls_of(14, (1, {9: 2, 10: 2, 13: 3}), (1, {1: 2, 3: 2, 5: 3, 8: 4}))
    found = stitch(calls, 6)  # steps 8 to 13 are shared, and 11 is the middle
    assert bases_and_steps(found) == ("ACCGT", [-1, 9, 11, 13, 16])


def test_ends() -> None:
    calls = calls_of(8, (1, {2: 2, 5: 3, 7: 2}))
    for a, b in zip(stitch(calls, 0), calls, strict=True):
        assert torch.equal(a, b)
    short = stitch(calls, 2, length=6)  # the last move lies behind the end
    assert bases_and_steps(short) == ("ACG", [-1, 2, 5]) and short.labels.shape == (1, 7)
    none = partita.ctc_crf_decode(torch.zeros(0, 1, 4, 5), state_len=1, alphabet_size=5)
    for a, b in zip(stitch(none, 0), none, strict=True):
        assert torch.equal(a, b)
    apart = stitch(calls_of(3, (1, {0: 2}), (2, {2: 4})), 0)
    assert bases_and_steps(apart) == ("ACT", [-1, 0, 5])


def test_a_chunk_without_a_path_leaves_no_bases() -> None:
    scores = read_of(30, 2, certainty=5.0)
    chunks = torch.cat([scores[:20], scores[10:]], 1)
    chunks[12, 1] = -torch.inf
    calls = partita.ctc_crf_decode(chunks, state_len=2, alphabet_size=5)
    found = stitch(calls, 10)
    assert found.lengths.tolist() == [0] and found.to_string() == [""]
    assert not found.labels.any() and not found.moves.any() and not found.log_probs.any()
    assert (found.steps == -1).all()


def plain_stitch(calls: Basecalls, overlap: int, length: int) -> tuple[list[int], list[int]]:
    """Return labels and steps of one read, joined step by step as the docstring says."""
    (N, T), k = calls.moves.shape, calls.labels.shape[1] - calls.moves.shape[1]
    stride, labels, steps = T - overlap, calls.labels.tolist(), calls.steps.tolist()

    def base_before(n: int, step: int) -> int:
        return k - 1 + sum(calls.moves[n, :step].tolist())

    def agreement(n: int, step: int) -> int:
        """Return how far chunks n and n + 1 agree before a step of the second one."""
        i, j = base_before(n, stride + step), base_before(n + 1, step)
        if labels[n][i - k + 1 : i + 1] != labels[n + 1][j - k + 1 : j + 1]:
            return 0
        return 1 + (steps[n + 1][j] >= 0 and steps[n][i] == stride + steps[n + 1][j])

    cuts = [
        min(range(overlap + 1), key=lambda s: (-agreement(n, s), abs(2 * s - overlap)))
        for n in range(N - 1)
    ]
    found_labels, found_steps = labels[0][:k], [-1] * k
    for n in range(N):
        for i in range(k, int(calls.lengths[n])):
            step = steps[n][i] + n * stride
            begin = n * stride + cuts[n - 1] if n else 0
            end = (n + 1) * stride + cuts[n] if n < N - 1 else N * T
            if begin <= step < end and step < length:
                found_labels.append(labels[n][i]), found_steps.append(step)
    return found_labels, found_steps


OVERLAP, LENGTHS = 11, (83, 30, 19, 12, 49, 0)  # with T = 30: 4, 1, 1, 1, 2 and 1 chunks


def chunks_of_reads() -> tuple[Basecalls, list[int]]:
    """Return calls of noise in chunks of 30 steps, and the number of chunks of each read."""
    T, stride = 30, 30 - OVERLAP
    counts = [1 + max(0, -(-(length - T) // stride)) for length in LENGTHS]
    chunks, lengths = [], []
    for seed, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        scores = read_of((count - 1) * stride + T, 2, certainty=1.5, seed=seed)
        scores[length:] = torch.nan
        chunks += [scores[n * stride : n * stride + T] for n in range(count)]
        lengths += [T] * (count - 1) + [length - (count - 1) * stride]
    batch = torch.cat(chunks, 1)
    return partita.ctc_crf_decode(
        batch, state_len=2, alphabet_size=BASES + 1, input_lengths=lengths
    ), counts


def some(calls: Basecalls, first: int, number: int) -> Basecalls:
    return Basecalls(*(part[first : first + number] for part in calls))


def test_a_batch_of_reads_is_each_read() -> None:
    calls, counts = chunks_of_reads()
    found = stitch(calls, OVERLAP, chunks=counts, length=LENGTHS)
    assert found.labels.shape == (6, 85) and found.moves.shape == (6, 83)
    first, reads = 0, []
    for r, (count, length) in enumerate(zip(counts, LENGTHS, strict=True)):
        reads.append(some(calls, first, count))
        first += count
        labels, steps = plain_stitch(reads[-1], OVERLAP, length)
        assert found.labels[r].tolist() == labels + [0] * (85 - len(labels))
        assert found.steps[r].tolist() == steps + [-1] * (85 - len(steps))
        assert found.lengths[r] == len(labels)
        assert found.moves[r].nonzero()[:, 0].tolist() == steps[2:]
        alone = stitch(reads[-1], OVERLAP, length=length)
        assert torch.equal(found.log_probs[r, : length + 2], alone.log_probs[0])
        assert not found.log_probs[r, length + 2 :].any()
    assert sum(map(len, found.to_string())) == int(found.lengths.sum())
    batches = [some(calls, 0, 3), some(calls, 3, 7)]
    for a, b, c in zip(
        found,
        stitch(reads, OVERLAP, length=LENGTHS),  # one read an entry
        stitch(batches, OVERLAP, chunks=torch.tensor(counts), length=LENGTHS),
        strict=True,
    ):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_no_reads() -> None:
    calls = some(chunks_of_reads()[0], 0, 0)
    found = stitch(calls, OVERLAP, chunks=[], length=[])
    assert found.labels.shape == (0, 2) and found.moves.shape == (0, 0)
    assert found.to_fastq() == "" and found.mean_q().shape == (0,)
    none = stitch(
        partita.ctc_crf_decode(torch.zeros(0, 0, 4, 5), state_len=1, alphabet_size=5), 0, chunks=[]
    )
    assert none.labels.shape == (0, 1)


def test_a_bad_chunk_is_that_of_its_read() -> None:
    """A chunk without a path leaves no bases, and one with NaN has NaN; other reads have theirs."""
    calls, counts = chunks_of_reads()
    expected = stitch(calls, OVERLAP, chunks=counts)
    calls.lengths[2] = 0  # a chunk of the first read
    calls.lengths[5], calls.log_probs[5] = 0, torch.nan  # the third read
    found = stitch(calls, OVERLAP, chunks=counts)
    assert found.lengths[[0, 2]].tolist() == [0, 0]
    assert not found.log_probs[0].any() and found.log_probs[2].isnan().all()
    for a, b in zip(found, expected, strict=True):
        rows = [1, 3, 4, 5]
        assert torch.equal(a[rows], b[rows])
    with raises("ValueError: log_probs: expected numbers, got NaN in sequence 2"):
        found.to_fastq()


@pytest.mark.parametrize(
    ("error", "given"),
    {
        "TypeError: calls: expected Basecalls or a list of them, got tuple": {"calls": tuple},
        "TypeError: overlap: expected an int, got float": {"overlap": 2.0},
        "ValueError: overlap: expected steps from 0 to 4, half of a chunk of 8": {"overlap": 5},
        "ValueError: overlap: expected steps from 0 to 4": {"overlap": -1},
        "TypeError: length: expected an int, got str": {"length": "8"},
        "ValueError: length: expected steps from 8 to 14 for 2 chunks": {"length": 15},
        "ValueError: length: expected steps from 8 to 14": {"length": 7},
        r"ValueError: calls: expected at least one chunk of each read, and 0 in all, got \[0\]": {
            "calls": lambda calls: some(calls, 0, 0)
        },
        "ValueError: calls: expected at least one Basecalls, got an empty list": {
            "calls": lambda calls: []
        },
        r"ValueError: calls: expected .* with one T and one k for all chunks,"
        r" got \[N, 7\] and \[N, 8\] and \[N, 8\] and \[N, 9\]": {
            "calls": lambda calls: [calls, calls_of(7, (1, {2: 2}))]
        },
        "TypeError: chunks: expected an int, got float": {"chunks": [1, 1.0]},
        "ValueError: chunks: expected at least one chunk of each read, and 2 in all": {
            "chunks": [2, 0]
        },
        "ValueError: chunks: expected at least one": {"chunks": [1, 2]},
        "ValueError: length: expected 2 of them, one a read, got 1": {
            "chunks": [1, 1],
            "length": 8,
        },
        "ValueError: length: expected steps from 0 to 8 for 1 chunks": {
            "chunks": [1, 1],
            "length": [8, 9],
        },
    }.items(),
)
def test_errors_name_the_argument(error: str, given: dict[str, Any]) -> None:
    """The entry `calls` says what is given instead of two chunks."""
    calls, options = calls_of(8, (1, {2: 2}), (2, {})), {"overlap": 2, **given}
    change = options.pop("calls", lambda calls: calls)
    with raises(error):
        stitch(change(calls), **options)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    scores = read_of(500, 3, certainty=2.0)
    expected = decoded_in_chunks(scores, 100, 40, state_len=3)
    found = decoded_in_chunks(scores.cuda(), 100, 40, state_len=3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_batch_of_reads_on_a_gpu() -> None:
    """The same calls are joined, because a GPU's own ones may differ by a rounding."""
    calls, counts = chunks_of_reads()
    expected = stitch(calls, OVERLAP, chunks=counts, length=LENGTHS)
    on_gpu = Basecalls(*(part.cuda() for part in calls))
    with no_waits():
        found = stitch(on_gpu, OVERLAP, chunks=counts, length=LENGTHS)
        quality = found.mean_q(5)
    for a, b in zip((*found, quality), (*expected, expected.mean_q(5)), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=0)
