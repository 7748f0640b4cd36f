"""partita.nn.CRF: the interface of pytorch-crf, against the enumeration of all taggings."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from helpers.errors import raises
from helpers.memory import no_waits
from torch import Tensor

import partita

T, N, C = 4, 3, 3
LENGTHS = torch.tensor([4, 2, 1])
layouts = pytest.mark.parametrize("batch_first", [False, True])


def batch() -> tuple[partita.nn.CRF, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    crf = partita.nn.CRF(C)
    emissions = torch.randn(T, N, C, generator=generator)
    tags = torch.randint(0, C, (T, N), generator=generator)
    return crf, emissions, tags, torch.arange(T)[:, None] < LENGTHS


def score(crf: partita.nn.CRF, emissions: Tensor, tags: tuple[int, ...]) -> Tensor:
    total = crf.start_transitions[tags[0]] + crf.end_transitions[tags[-1]]
    total = total + emissions[range(len(tags)), tags].sum()
    return total + sum(crf.transitions[i, j] for i, j in itertools.pairwise(tags))


def enumerated(crf: partita.nn.CRF, emissions: Tensor, tags: Tensor) -> tuple[Tensor, list]:
    likelihoods, best = [], []
    for n, length in enumerate(LENGTHS.tolist()):
        taggings = list(itertools.product(range(C), repeat=length))
        scores = torch.stack([score(crf, emissions[:, n], y) for y in taggings])
        own = score(crf, emissions[:, n], tuple(tags[:length, n].tolist()))
        likelihoods.append(own - scores.logsumexp(0))
        best.append(list(taggings[scores.argmax()]))
    return torch.stack(likelihoods), best


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@layouts
def test_likelihoods_and_best_tags(batch_first: bool, dtype: torch.dtype) -> None:
    crf, emissions, tags, mask = batch()
    expected, best = enumerated(crf, emissions, tags)
    arguments = emissions, tags.masked_fill(~mask, -100), mask.to(dtype)
    if batch_first:
        state = crf.state_dict()
        crf = partita.nn.CRF(C, batch_first=True)
        crf.load_state_dict(state)
        arguments = tuple(t.transpose(0, 1) for t in arguments)
    torch.testing.assert_close(crf(*arguments, reduction="none"), expected)
    torch.testing.assert_close(crf(*arguments), expected.sum())
    torch.testing.assert_close(crf(*arguments, "mean"), expected.mean())
    torch.testing.assert_close(crf(*arguments, "token_mean"), expected.sum() / LENGTHS.sum())
    assert crf.decode(arguments[0], arguments[2]) == best


def test_all_tokens_without_a_mask() -> None:
    crf, emissions, tags, _ = batch()
    full = torch.ones(T, N, dtype=torch.bool)
    for reduction in ("none", "sum", "mean", "token_mean"):
        torch.testing.assert_close(
            crf(emissions, tags, reduction=reduction), crf(emissions, tags, full, reduction)
        )
    assert crf.decode(emissions) == crf.decode(emissions, full)


def test_parameters_are_those_of_pytorch_crf() -> None:
    crf = partita.nn.CRF(5)
    shapes = {name: tuple(value.shape) for name, value in crf.state_dict().items()}
    assert shapes == {"start_transitions": (5,), "end_transitions": (5,), "transitions": (5, 5)}
    assert all(p.abs().max() <= 0.1 and p.requires_grad for p in crf.parameters())
    assert "num_tags=5" in repr(crf)
    loss = -crf(torch.zeros(3, 2, 5), torch.zeros(3, 2, dtype=torch.int64))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in crf.parameters())


@pytest.mark.parametrize(
    ("error", "change"),
    {
        r"ValueError: emissions: expected shape \[T, N, C\]": {"emissions": torch.zeros(T, N)},
        "ValueError: emissions: expected 3 tags": {"emissions": torch.zeros(T, N, C + 1)},
        "ValueError: tags: expected shape": {"tags": torch.zeros(T, N + 1).long()},
        "IndexError: tags: expected classes from 0 to 2": {"tags": torch.full((T, N), C)},
        "ValueError: mask: expected shape": {"mask": torch.ones(T, N + 1).bool()},
        "ValueError: mask: expected at least one token .* got none in 2": {
            "mask": torch.ones(T, N).bool() & (torch.arange(N) != 2)
        },
        "TypeError: mask: expected dtype torch.bool, got torch.int64": {
            "mask": torch.ones(T, N, dtype=torch.int64)
        },
        "ValueError: reduction: expected one of 'none', 'sum'": {"reduction": "median"},
    }.items(),
)
def test_errors(error: str, change: dict) -> None:
    crf, emissions, tags, mask = batch()
    arguments = {"emissions": emissions, "tags": tags, "mask": mask, **change}
    with raises(error):
        crf(**arguments)


def test_a_number_of_tags_is_positive() -> None:
    with pytest.raises(ValueError, match="num_tags: expected a number of tags"):
        partita.nn.CRF(0)


def with_holes(
    batch_first: bool = False, **options: object
) -> tuple[partita.nn.CRF, Tensor, Tensor, Tensor]:
    """Return a module in fp64 and a batch with masked tokens, which hold NaN and -100."""
    generator = torch.Generator().manual_seed(1)
    crf = partita.nn.CRF(C, batch_first, **options).double()
    for parameter in crf.parameters():
        parameter.data.normal_(generator=generator)
    # The first token, tokens in the middle, the last one, a single one, a prefix.
    mask = torch.tensor(
        [[0, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    ).bool()
    emissions = torch.randn(*mask.shape, C, generator=generator, dtype=torch.float64)
    emissions[~mask] = torch.nan
    tags = torch.randint(0, C, mask.shape, generator=generator).masked_fill(~mask, -100)
    if batch_first:
        return crf, emissions, tags, mask
    return crf, emissions.transpose(0, 1), tags.T, mask.T


def alone(crf: partita.nn.CRF, x: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the tokens of each sequence that count, as batches `[T, 1, ...]` of one sequence."""
    x, mask = (x, mask) if crf.batch_first else (x.transpose(0, 1), mask.T)
    return [row[counts][:, None] for row, counts in zip(x, mask, strict=True)]


@layouts
@pytest.mark.parametrize("constraints", [None, "BIO"])
def test_tokens_that_do_not_count_are_as_if_they_were_not_there(
    batch_first: bool, constraints: str | None
) -> None:
    options = {"labels": ["O", "B-x", "I-x"], "constraints": constraints}
    crf, emissions, tags, mask = with_holes(batch_first, **options)
    if constraints:
        tags = tags.where(tags != 2, 1)  # which may follow anything
    emissions.requires_grad_()
    variables = (emissions, *crf.parameters())
    found = crf(emissions, tags, mask, reduction="none")
    grads = torch.autograd.grad((found * torch.arange(1, 5)).sum(), variables)

    plain = partita.nn.CRF(C, **options).double()
    plain.load_state_dict(crf.state_dict())
    sentences = alone(crf, emissions, mask), alone(crf, tags, mask)
    expected = torch.stack([plain(*each) for each in zip(*sentences, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    others = torch.autograd.grad(
        (expected * torch.arange(1, 5)).sum(), (emissions, *plain.parameters())
    )
    for a, b in zip(grads, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert not grads[0][~mask].any()

    best = [plain.decode(sentence)[0] for sentence in sentences[0]]
    assert crf.decode(emissions, mask) == best
    assert [len(row) for row in best] == [3, 3, 1, 3]
    confidences, ranked = crf.confidences(emissions, mask), crf.nbest(emissions, 4, mask)
    assert confidences.shape == mask.shape and not confidences[~mask].any()
    assert ranked.states.shape == (4, *mask.shape) and (ranked.states[:, ~mask] == -1).all()
    for n, sentence in enumerate(sentences[0]):
        row, counts = (confidences, mask) if batch_first else (confidences.T, mask.T)
        of_sentence = plain.confidences(sentence)[:, 0]
        torch.testing.assert_close(row[n][counts[n]], of_sentence, rtol=1e-11, atol=1e-11)
        own = plain.nbest(sentence, 4)
        torch.testing.assert_close(ranked.score[:, n], own.score[:, 0])
        states = ranked.states[:, n] if batch_first else ranked.states[:, :, n]
        assert torch.equal(states[:, counts[n]], own.states[:, :, 0])


@layouts
def test_confidences_are_posteriors_of_the_best_tags(batch_first: bool) -> None:
    crf, emissions, _, mask = batch()
    crf.batch_first = batch_first
    best = enumerated(crf, emissions, torch.zeros(T, N, dtype=torch.int64))[1]
    given = (emissions.transpose(0, 1), mask.T) if batch_first else (emissions, mask)
    found = crf.confidences(*given)
    found = found if batch_first else found.T
    for n, length in enumerate(LENGTHS.tolist()):
        taggings = list(itertools.product(range(C), repeat=length))
        p = torch.stack([score(crf, emissions[:, n], y) for y in taggings]).softmax(0)
        for t in range(length):
            share = sum(w for w, y in zip(p, taggings, strict=True) if y[t] == best[n][t])
            torch.testing.assert_close(found[n, t], share, rtol=1e-5, atol=1e-6)
    assert not found[~mask.T].any()


BIOES = ["E-b", "O", "S-a", "B-a", "I-a", "E-a", "B-b", "B", "E"]


def is_allowed(names: tuple[str, ...], scheme: str) -> bool:
    """Return whether tags are segments, by a regular expression for each type."""
    segment = "B-{0}( I-{0})*" if scheme == "BIO" else "(S-{0}|B-{0}( I-{0})* E-{0})"
    types = {name.partition("-")[2] for name in names if name != "O"}
    parts = ["O", *(segment.format(re.escape(each)) for each in types)]
    text = " ".join(name if "-" in name or name == "O" else f"{name}-" for name in names)
    either = "|".join(f"({part})" for part in parts)
    return re.fullmatch(f"({either})( ({either}))*", text) is not None


@pytest.mark.parametrize(
    ("scheme", "labels"),
    [("BIO", ["I-a", "O", "B-b", "B-a", "I-b"]), ("BIO", ["B", "I", "O"]), ("BIOES", BIOES)],
)
def test_constraints_leave_the_taggings_of_the_scheme(scheme: str, labels: list[str]) -> None:
    crf = partita.nn.CRF(len(labels), labels=labels, constraints=scheme).double()
    free = partita.nn.CRF(len(labels)).double()
    free.load_state_dict(crf.state_dict())
    emissions = torch.randn(4, 1, len(labels), dtype=torch.float64)
    taggings = torch.cartesian_prod(*[torch.arange(len(labels))] * 4)
    allowed = torch.tensor(
        [is_allowed(tuple(labels[i] for i in row), scheme) for row in taggings.tolist()]
    )
    assert 3 < allowed.sum() < len(allowed) / 2
    scores = free.chain(emissions).log_prob(taggings[..., None])[:, 0]
    expected = scores.where(allowed, -torch.inf).log_softmax(0)
    found = crf.chain(emissions).log_prob(taggings[..., None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    best = crf.nbest(emissions, 3)
    order = expected.argsort(descending=True)[:3]
    assert torch.equal(best.states[:, :, 0], taggings[order])
    for row in taggings[~allowed][::97]:
        with pytest.raises(ValueError, match=f"tags: expected what constraints='{scheme}' allow"):
            crf(emissions, row[:, None])


def test_constraints_are_no_parameters() -> None:
    labels = ["O", "B-x", "I-x"]
    crf = partita.nn.CRF(3, labels=labels, constraints="BIO")
    assert set(crf.state_dict()) == set(partita.nn.CRF(3).state_dict())
    assert all(value.isfinite().all() for value in crf.state_dict().values())
    assert "constraints='BIO'" in repr(crf)
    emissions = torch.zeros(3, 1, 3, requires_grad=True)
    crf(emissions, torch.tensor([[0], [1], [2]])).backward()
    assert all(p.grad.isfinite().all() for p in (*crf.parameters(), emissions))
    assert crf.transitions.grad[0, 2] == crf.start_transitions.grad[2] == 0
    with torch.device("meta"):
        made = partita.nn.CRF(3, labels=labels, constraints="BIO")
    made = made.to_empty(device="cpu")
    made.load_state_dict(crf.state_dict())
    copies = made, copy.deepcopy(crf), pickle.loads(pickle.dumps(crf))
    for other in copies:
        assert other.decode(emissions + 5 * torch.eye(3)[2]) == crf.decode(
            emissions + 5 * torch.eye(3)[2]
        )


@layouts
@pytest.mark.parametrize(
    ("tags", "error"),
    {
        (2, -1, 2, 0): r"'I-x' after the start at \[{}\]",
        (1, -1, 2, 3): r"'E-y' after 'I-x' at \[{}\]",
        (4, -1, 4, 1): r"the end after 'B-x' at \[{}\]",
    }.items(),
)
def test_tags_that_the_constraints_forbid(
    tags: tuple[int, ...], error: str, batch_first: bool
) -> None:
    labels = ["O", "B-x", "I-x", "E-y", "S-x"]
    crf = partita.nn.CRF(5, batch_first, labels=labels, constraints="BIOES")
    given = torch.tensor([[0, 0, 0, 0, 0], [-100, *tags]])
    mask = given >= 0
    place = {2: 1, 1: 4, 4: 4}[tags[0]]
    emissions, index = torch.zeros(2, 5, 5), f"1, {place}"
    if not batch_first:
        emissions, given, mask = emissions.transpose(0, 1), given.T, mask.T
        index = f"{place}, 1"
    message = f"^tags: expected what constraints='BIOES' allow, got {error.format(index)}$"
    with pytest.raises(ValueError, match=message):
        crf(emissions, given, mask)


def test_forbidden_tags_have_no_likelihood_where_values_are_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    crf = partita.nn.CRF(3, labels=["O", "B", "I"], constraints="BIO")
    found = crf(torch.zeros(2, 2, 3), torch.tensor([[0, 1], [2, 2]]), reduction="none")
    assert found[0] == -torch.inf and found[1].isfinite()


@pytest.mark.parametrize(
    ("error", "options"),
    {
        "TypeError: labels: expected a sequence of strings": {"labels": "OBI"},
        "TypeError: labels: expected a sequence of strings, got": {"labels": ["O", "B", 2]},
        "ValueError: labels: expected 3 different names, .* got 2 in": {"labels": ["O", "B"]},
        "ValueError: labels: expected 3 different .*": {"labels": ["O", "B", "B"]},
        "ValueError: labels: expected the names of the tags with constraints='BIO', got None": {
            "constraints": "BIO"
        },
        "ValueError: constraints: expected one of 'BIO', 'BIOES', got 'IOB'": {
            "labels": ["O", "B", "I"],
            "constraints": "IOB",
        },
        **{
            f"ValueError: labels: expected 'O' or 'B-TYPE', 'I-TYPE' .* got '{name}'": {
                "labels": ["O", "B-x", name],
                "constraints": "BIO",
            }
            for name in ("E-x", "PER", "B-", "O-x", "", "BI-x", "b-x")
        },
    }.items(),
)
def test_errors_of_labels(error: str, options: dict) -> None:
    with raises(error):
        partita.nn.CRF(3, **options)


@layouts
def test_a_mask_of_prefixes_copies_no_emissions(batch_first: bool) -> None:
    _, emissions, _, mask = batch()
    crf = partita.nn.CRF(C, batch_first)
    if batch_first:
        emissions, mask = emissions.transpose(0, 1), mask.T
    chain = crf.chain(emissions, mask)
    assert chain.emissions.data_ptr() == emissions.data_ptr()
    assert chain.lengths.tolist() == LENGTHS.tolist()
    mask = mask.clone()
    mask[0, 0] = False
    assert crf.chain(emissions, mask).emissions.data_ptr() != emissions.data_ptr()


@layouts
def test_a_compiled_module_has_the_same_results(batch_first: bool) -> None:
    options = {"labels": ["O", "B-x", "I-x"], "constraints": "BIO"}
    crf, emissions, tags, mask = with_holes(batch_first, **options)
    tags = tags.where(tags != 2, 0)

    def results(crf: partita.nn.CRF, emissions: Tensor) -> tuple[Tensor, ...]:
        return (
            crf(emissions, tags, mask),
            crf.confidences(emissions, mask),
            crf.nbest(emissions, 2, mask).states,
        )

    torch._dynamo.reset()
    compiled = torch.compile(results, fullgraph=True, backend="aot_eager")
    found, expected = compiled(crf, emissions), results(crf, emissions)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_a_module_on_a_gpu_has_the_same_results() -> None:
    options = {"labels": ["O", "B-x", "I-x"], "constraints": "BIO"}
    crf, emissions, tags, mask = with_holes(**options)
    tags = tags.where(tags != 2, 0)
    expected = crf(emissions, tags, mask), crf.confidences(emissions, mask)
    best = crf.nbest(emissions, 3, mask)
    on_gpu = copy.deepcopy(crf).cuda()
    given = [each.cuda() for each in (emissions, tags, mask)]
    on_gpu(*given)  # makes the table of the constraints
    with no_waits():
        found = on_gpu(*given), on_gpu.confidences(given[0], given[2])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)
    assert torch.equal(on_gpu.nbest(given[0], 3, given[2]).states.cpu(), best.states)
    assert on_gpu.decode(given[0], given[2]) == crf.decode(emissions, mask)
