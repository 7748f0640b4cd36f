import pytest
from helpers.ngrams import corpus, model_of
from helpers.transducers import LABELS

from partita import NgramLM


@pytest.fixture(scope="session")
def model() -> NgramLM:
    """Return a language model of the labels of the small transducers."""
    return model_of(corpus(200, words=6), 3, labels=LABELS)
