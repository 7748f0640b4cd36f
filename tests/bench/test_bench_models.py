"""The benchmarks of n-gram models and of hidden Markov models, and the calls of their peers."""

from typing import Any

import pytest
import torch
from helpers.bench import installed, note_of_wrong, run, stand_in
from torch import Tensor

import partita
from partita.bench import hmm, language_model
from partita.bench.case import Buffers

SCORE = language_model.NgramCase("ngram_score", torch.float64, 30, 4)
ADVANCE = language_model.NgramCase("ngram_advance", torch.float64, 30, 4)
FIT = hmm.HmmCase("hmm_fit", torch.float32, 20, 3, 4, 2)
POSTERIORS = hmm.HmmCase("hmm_posteriors", torch.float32, 20, 3, 4, 2)


def test_wrong_results_are_found() -> None:
    note_of_wrong(SCORE, lambda x: x.model.score(x.sentences, eos=False))
    note_of_wrong(ADVANCE, lambda x: x.model.advance(x.states.flip(0))[0])

    def of_one_sequence(X: Tensor, lengths: list[int], parameters: dict[str, Tensor]) -> Any:
        return hmm.FUNCTIONS["hmm_fit"](partita.hmm)(X, None, parameters)

    note_of_wrong(FIT, of_one_sequence)


def test_kenlm_gets_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in reads the file by NgramLM, and keeps a state as kenlm does."""

    class State:
        words: tuple[str, ...] = ()

    class Model:
        def __init__(self, path: str) -> None:
            self.model = partita.NgramLM.from_arpa(path)

        def score(self, text: str) -> float:
            return float(self.model.score(text)) / language_model.LN10

        def BeginSentenceWrite(self, state: State) -> None:
            state.words = ()

        def BaseScore(self, state: State, word: str, following: State) -> float:
            following.words = (*state.words, word)
            before, after = self.model.score([[*state.words], [*following.words]], eos=False)
            return float(after - before) / language_model.LN10

    stand_in(monkeypatch, "kenlm", Model=Model, State=State)
    rows = run([SCORE, ADVANCE], installed("kenlm"))
    assert [row.case.op for row in rows if row.timing] == ["ngram_score", "ngram_advance"]
    assert all(row.error < 1e-5 for row in rows)


def test_hmmlearn_gets_arrays() -> None:
    pytest.importorskip("hmmlearn")
    rows = run([FIT, POSTERIORS], installed("hmmlearn"))
    assert all(row.timing and row.error < 1e-9 for row in rows) and len(rows) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "name", "module"), [(SCORE, "kenlm", language_model), (FIT, "hmmlearn", hmm)]
)
def test_peers_that_run_on_the_host_refuse_a_gpu(case: Any, name: str, module: Any) -> None:
    inputs = case.inputs(Buffers(torch.device("cuda")))
    assert module.PROVIDERS[name][case.op].beyond(inputs) == "runs on the host"
