"""The examples of chains, a tagger and a hidden Markov model, at a small size."""

import itertools
import math
import re
from pathlib import Path

import hmm
import hmm_fit
import pytest
import regimes
import tagger
import tagger_data
import torch
from helpers.examples import (
    assert_is_wide,
    lines_of,
    lines_with_few_batches,
    options,
    two_reports,
)
from matplotlib.image import imread

import partita

TAGGER = {"files": 20, "width": 8, "layers": 1}
HMM = {"regimes": 3, "starts": 3, "steps": 60}


def test_tagger_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new folder" / "tagger"
    arguments = options({**TAGGER, "out": out})
    lines = lines_with_few_batches(tagger, arguments, 2, "Fewer than 90%", monkeypatch, capsys)
    assert list(lines) == ["Loss diff", "Grad diff (max)", "CRF", "Softmax", "Picture"]
    # The loss is below 3 nats a character. Marginals are within 2e-6, and a table's gradient is
    # their mean over the characters.
    assert float(lines["Loss diff"]) <= 3e-6 and float(lines["Grad diff (max)"]) <= 2e-6
    form = (
        r"[\d.]+% of characters right \(mean confidence [\d.]+%\), [\d.]+% of lines without a"
        r" fault, [\d,]+ broken tokens, \d+ ms a batch"
    )
    assert all(re.fullmatch(form, lines[name]) for name in tagger.METHODS)
    assert_is_wide(out)


def test_tagger_is_deterministic_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {**TAGGER, "batches": 6, "seed": 3, "out": tmp_path / "tagger.png"}
    first, second = two_reports(tagger, monkeypatch, **arguments)
    assert first == second
    assert all(score.characters > 2 / len(tagger.TAGS) for score in first.scores.values())


def test_tags_are_those_of_tokenize() -> None:
    text = 'if é1 :\n\tx="""a\n  b"""# 2\n'
    kinds = ["space", *tagger.KINDS]
    letters = ["_", *(x for kind in kinds[1:] for x in (kind[0].upper(), kind[0]))]
    written = "".join(letters[tag] for tag in tagger_data.tags_of(text))
    assert written == "Kk_Nn_O__NOSssssssssssCcc_"
    assert tagger_data.tags_of("") == []


def test_the_taggers_plain_loss_is_correct() -> None:
    """The plain loss agrees with a sum over every path of two short chains."""
    generator = torch.Generator().manual_seed(0)
    C, lengths = len(tagger.TAGS), [3, 2]
    emissions = torch.randn(3, 2, C, dtype=torch.float64, generator=generator)
    transitions, ends = (
        torch.randn(rows, C, dtype=torch.float64, generator=generator) for rows in (C, 2)
    )
    tags = torch.tensor([[1, 2, 0], [4, 11, -1]])

    def score(n: int, path: tuple[int, ...]) -> float:
        steps = sum(emissions[t, n, c].item() for t, c in enumerate(path)) + sum(
            transitions[pair].item() for pair in itertools.pairwise(path)
        )
        return steps + ends[0, path[0]].item() + ends[1, path[-1]].item()

    total = 0.0
    for n, length in enumerate(lengths):
        paths = itertools.product(range(C), repeat=length)
        total += math.log(math.fsum(math.exp(score(n, path)) for path in paths))
        total -= score(n, tuple(tags[n, :length].tolist()))
    expected = pytest.approx(total / 5, rel=1e-12)
    batch = tagger.Snippets(torch.zeros_like(tags), tags, torch.tensor(lengths))
    assert tagger.plain_loss(emissions, transitions, ends, batch).item() == expected
    chain = partita.linear_chain(emissions, transitions, *ends, lengths=lengths)
    assert tagger.chain_loss(chain, batch).item() == expected


def test_tagger_scores_lines_and_broken_tokens() -> None:
    text = torch.tensor([list(b"a b\n\nc\n"), list(b"de\n\0\0\0\0")])
    truth = torch.tensor([[1, 0, 1, 0, 0, 1, 0], [1, 2, 0, -1, -1, -1, -1]])
    found = truth.clone()
    found[0, 2], found[1, 0] = 2, 3  # a name continues after a space, and after a keyword
    score = tagger.score(
        tagger.Guess(found, torch.full(truth.shape, 0.5)),
        tagger.Snippets(text, truth, torch.tensor([7, 3])),
    )
    assert score == (pytest.approx(0.8), pytest.approx(1 / 3), 2, 0.5)


def test_hmm_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new folder" / "hmm"
    assert hmm.main([*options({**HMM, "out": out}), "--quiet"]) == 0
    lines = lines_of(capsys.readouterr().out)
    differences = ["Log-likelihood diff to statsmodels", "Posterior diff to statsmodels (max)"]
    regimes = [f"Regime {i}" for i in (1, 2, 3)]
    assert list(lines) == [
        "Log-likelihood",
        *differences,
        *regimes,
        "Probability of the best path",
        "Entropy of the path",
        "Changes of regime",
        "Picture",
    ]
    assert all(float(lines[name]) <= 1e-9 for name in differences)
    form = r"[+-]\d\.\d\d ± \d\.\d\d °C, \d+% of the time, lasts [\d.]+ months"
    assert all(re.fullmatch(form, lines[name]) for name in regimes)
    assert_is_wide(out)


def test_hmm_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {**HMM, "seed": 3, "out": tmp_path / "hmm.png"}
    first, second = two_reports(hmm, monkeypatch, **arguments)
    assert first == second


def test_expectation_maximization_and_the_gradient_find_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hmm, "draw", lambda *parts: None)
    found = hmm.run(3, 3, 200, 3, tmp_path / "hmm.svg", quiet=True, method="em")
    other = hmm.run(3, 3, 200, 3, tmp_path / "hmm.svg", quiet=True)
    assert max(found.difference) <= 1e-9
    assert abs(found.log_likelihood - other.log_likelihood) < 1
    values = hmm.load().values
    start = hmm_fit.draw_starts(values, 3, 3, torch.Generator().manual_seed(0))
    curves = torch.stack([logz for _, logz in hmm_fit.em_steps(values, start, 20)])
    assert (curves.diff(dim=0) > -0.1).all()  # but for the first month, no step is downward


@pytest.mark.parametrize("method", sorted(hmm_fit.METHODS))
def test_the_starts_of_a_batch_do_not_meet(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start has the same log-likelihoods as it would have alone."""
    values = hmm.load().values
    drawn = torch.Generator().manual_seed(0)
    months = torch.randint(len(values), (3, 2), generator=drawn)
    moves = torch.randn(3, 2, 2, dtype=torch.float64, generator=drawn)

    def curves(chosen: slice) -> torch.Tensor:
        monkeypatch.setattr(torch, "randint", lambda *_, **__: months[chosen])
        monkeypatch.setattr(torch, "randn", lambda *_, **__: moves[chosen])
        return hmm_fit.fit(values, 2, len(months[chosen]), 20, drawn, True, method).curves

    together, alone = curves(slice(0, 3)), [curves(slice(i, i + 1)) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-9, atol=0)
    assert (together[-1] > together[0]).all()


def test_hmm_says_when_statsmodels_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hmm, "compare", lambda *_: hmm.Difference(0.0, math.nan))
    monkeypatch.setattr(hmm, "draw", lambda *parts: None)
    arguments = options({**HMM, "steps": 1, "out": tmp_path / "hmm.png"})
    assert hmm.main([*arguments, "--quiet"]) == 1
    assert "statsmodels differs" in capsys.readouterr().err


def test_the_stationary_distribution_stays() -> None:
    transitions = torch.rand(
        5, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    transitions = transitions / transitions.sum(-1, keepdim=True)
    found = hmm_fit.stationary(transitions)
    torch.testing.assert_close(found.sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close((found[:, None] @ transitions)[:, 0], found)


def test_tagger_needs_two_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="files: expected enough"):
        tagger.run(
            **{**TAGGER, "files": 1}, batches=2, seed=0, out=tmp_path / "tagger.png", quiet=True
        )


def test_hmm_refuses_a_number_of_regimes_that_it_has_no_colours_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        hmm.main(["--regimes", "7"])
    assert "argument --regimes: invalid choice: 7" in capsys.readouterr().err


def test_regimes_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "regimes.png"
    assert regimes.main(["--starts", "4", "--out", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("Regime: ") for line in lines) == 2
    assert sum("ahead: growth" in line for line in lines) == 4
    assert imread(picture).shape[2] == 4
    series = regimes.load()
    model = regimes.fit(series.values, 2, 4)
    slow = int(model.means_[:, 0].argmin())
    recession = (series.years >= 2008.25) & (series.years < 2009.5)
    assert (model.predict(series.values)[recession] == slow).all()
