"""partita.hmm beside hmmlearn: from the same parameters every iteration gives the same ones."""

import logging
from typing import Any

import numpy as np
import pytest

import partita

theirs = pytest.importorskip("hmmlearn.hmm", reason="hmmlearn is in the group `test`")
logging.getLogger("hmmlearn").setLevel(logging.ERROR)

C, F, K = 3, 2, 5
LENGTHS = [40, 1, 25, 60]
NEVER = -1e9  # as a tolerance: no fit ends before its last iteration
RANDOM = np.random.RandomState(0)
PATH = RANDOM.randint(C, size=sum(LENGTHS))
START = np.array([0.5, 0.5, 0.0])
MOVES = np.array([[0.8, 0.2, 0.0], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])
MEANS = np.array([[0.0, 0.0], [3.0, 1.0], [-2.0, 4.0]])
GAUSSIAN = MEANS[PATH] + RANDOM.normal(size=(len(PATH), F)) * 0.8 + 50
SYMBOLS = RANDOM.randint(K, size=(len(PATH), 1))
COUNTS = RANDOM.poisson(np.array([[1, 5], [4, 2], [9, 9]])[PATH])
COVARS = {
    "spherical": np.array([1.0, 0.5, 2.0]),
    "diag": np.array([[1.0, 2.0], [0.5, 1.0], [2.0, 1.0]]),
    "full": np.array(
        [[[1.0, 0.3], [0.3, 2.0]], [[0.5, 0.0], [0.0, 1.0]], [[2.0, -0.5], [-0.5, 1]]]
    ),
    "tied": np.array([[1.0, 0.2], [0.2, 1.5]]),
}
STATES = {"startprob_": START, "transmat_": MOVES}
OF_STATES = {"startprob_prior": 2.0, "transmat_prior": np.full((C, C), 1.5)}
OF_GAUSSIAN = {
    "means_prior": 49.0,
    "means_weight": 0.7,
    "covars_prior": 0.3,
    "covars_weight": 5,
}


def gaussian(kind: str, **options: Any) -> tuple[str, Any, dict[str, Any], dict[str, Any]]:
    values = {**STATES, "means_": MEANS + 50.5, "covars_": COVARS[kind]}
    return "GaussianHMM", GAUSSIAN, values, {"covariance_type": kind, **options}


CATEGORICAL = {**STATES, "emissionprob_": RANDOM.dirichlet(np.ones(K), C)}
POISSON = {**STATES, "lambdas_": np.array([[1.5, 4.0], [4.0, 3.0], [8.0, 8.0]])}
CASES = {
    **{kind: gaussian(kind) for kind in COVARS},
    **{f"{kind}, priors": gaussian(kind, **OF_STATES, **OF_GAUSSIAN) for kind in COVARS},
    "covars only": gaussian("diag", params="mc"),
    "no covars": gaussian("full", params="stm"),
    "categorical": ("CategoricalHMM", SYMBOLS, CATEGORICAL, {}),
    "categorical, priors": (
        *("CategoricalHMM", SYMBOLS, CATEGORICAL),
        {**OF_STATES, "emissionprob_prior": 1.5},
    ),
    "categorical, prior below 1": (
        *("CategoricalHMM", SYMBOLS, CATEGORICAL),
        {"emissionprob_prior": 0.5, "transmat_prior": 0.9},
    ),
    "poisson": ("PoissonHMM", COUNTS, POISSON, {}),
}
# A fit without priors ends by its tolerance; the log-likelihood of others may fall.
FITS = [
    *((case, 1, NEVER) for case in CASES),
    *((case, 20, NEVER) if "prior" in case else (case, 60, 1e-2) for case in CASES),
]


def both(case: str, **options: Any) -> tuple[Any, Any, Any]:
    """Return their model and ours with the same parameters, and the values."""
    name, X, values, own = CASES[case]
    models = []
    for module in (theirs, partita.hmm):
        model = getattr(module, name)(C, init_params="", **own, **options)
        for attribute, value in values.items():
            setattr(model, attribute, value.copy())
        models.append(model)
    return *models, X


def parameters(model: Any) -> dict[str, Any]:
    """Return the attributes of a model; hmmlearn's spherical variances are those of a column."""
    names = ("startprob_", "transmat_", "means_", "_covars_", "emissionprob_", "lambdas_")
    found = {name: getattr(model, name) for name in names if hasattr(model, name)}
    if getattr(model, "covariance_type", "") == "spherical" and found["_covars_"].ndim == 2:
        found["_covars_"] = found["_covars_"][:, 0]
    return found


@pytest.mark.filterwarnings("ignore:the model does not converge")
@pytest.mark.parametrize(("case", "iterations", "tol"), FITS)
def test_iterations_are_those_of_hmmlearn(case: str, iterations: int, tol: float) -> None:
    other, ours, X = both(case, n_iter=iterations, tol=tol)
    other.fit(X, LENGTHS), ours.fit(X, LENGTHS)
    assert ours.monitor_.iter == other.monitor_.iter
    assert ours.monitor_.converged is bool(other.monitor_.converged)
    np.testing.assert_allclose(ours.monitor_.history, other.monitor_.history, rtol=1e-9)
    expected = parameters(other)
    assert set(parameters(ours)) == set(expected)
    for name, value in parameters(ours).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-9, err_msg=name)
    if iterations > 1:
        assert (ours.startprob_[2], ours.transmat_[0, 2]) == (0, 0)


@pytest.mark.parametrize("case", CASES)
def test_what_a_model_computes_is_that_of_hmmlearn(case: str) -> None:
    other, ours, X = both(case, implementation="scaling")  # fits have the default, "log"
    assert ours.score(X, LENGTHS) == pytest.approx(other.score(X, LENGTHS), rel=1e-10)
    assert ours.score(X[:7]) == pytest.approx(other.score(X[:7]), rel=1e-10)
    log_prob, posteriors = ours.score_samples(X, LENGTHS)
    expected = other.score_samples(X, LENGTHS)
    assert log_prob == pytest.approx(expected[0], rel=1e-10)
    np.testing.assert_allclose(posteriors, expected[1], atol=1e-9)
    np.testing.assert_array_equal(ours.predict_proba(X, LENGTHS), posteriors)
    for algorithm in ("viterbi", "map"):
        score, states = ours.decode(X, LENGTHS, algorithm=algorithm)
        other_score, other_states = other.decode(X, LENGTHS, algorithm=algorithm)
        assert score == pytest.approx(other_score, rel=1e-9)
        np.testing.assert_array_equal(states, other_states)
    np.testing.assert_array_equal(ours.predict(X, LENGTHS), other.predict(X, LENGTHS))
    assert ours.aic(X, LENGTHS) == pytest.approx(other.aic(X, LENGTHS), rel=1e-10)
    assert ours.bic(X, LENGTHS) == pytest.approx(other.bic(X, LENGTHS), rel=1e-10)
    np.testing.assert_allclose(
        ours.get_stationary_distribution(), other.get_stationary_distribution().real, atol=1e-9
    )


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name, X", [("CategoricalHMM", SYMBOLS), ("PoissonHMM", COUNTS)])
def test_a_seed_gives_the_fit_that_it_gives_in_hmmlearn(name: str, X: Any, seed: int) -> None:
    options = {"random_state": seed, "n_iter": 20, "tol": NEVER}
    other = getattr(theirs, name)(C, **options).fit(X, LENGTHS)
    ours = getattr(partita.hmm, name)(C, **options).fit(X, LENGTHS)
    for attribute, value in parameters(ours).items():
        np.testing.assert_allclose(value, getattr(other, attribute), rtol=1e-5, atol=1e-8)


def test_a_seed_gives_a_gaussian_model_their_start_and_transitions() -> None:
    options = {"random_state": 5, "n_iter": 1, "params": ""}
    other = theirs.GaussianHMM(C, **options).fit(GAUSSIAN)
    ours = partita.hmm.GaussianHMM(C, **options).fit(GAUSSIAN)
    np.testing.assert_allclose(ours.startprob_, other.startprob_)
    np.testing.assert_allclose(ours.transmat_, other.transmat_)
    np.testing.assert_allclose(ours.covars_, other.covars_)
    order = [x.means_[:, 0].argsort() for x in (ours, other)]
    np.testing.assert_allclose(ours.means_[order[0]], other.means_[order[1]], atol=0.2)


@pytest.mark.parametrize("name", ["GaussianHMM", "CategoricalHMM", "PoissonHMM", "BaseHMM"])
def test_constructors_have_their_arguments(name: str) -> None:
    import inspect

    import hmmlearn.base

    module = hmmlearn.base if name == "BaseHMM" else theirs
    expected = inspect.signature(getattr(module, name)).parameters
    found = dict(inspect.signature(getattr(partita.hmm, name)).parameters)
    assert found.pop("n_init").default == 1
    assert list(found) == list(expected)
    for argument, parameter in found.items():
        assert parameter.default == expected[argument].default, argument
        assert parameter.kind == expected[argument].kind, argument
