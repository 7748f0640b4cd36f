"""partita.hmm: missing values, restarts, filtering, forecasts, and the forms of results."""

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from torch import Tensor

import partita
from partita.hmm import (
    BaseHMM,
    CategoricalHMM,
    ConvergenceMonitor,
    GaussianHMM,
    PoissonHMM,
    base,
)

C, F = 3, 2
NAN = float("nan")
START = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
MOVES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
KINDS = ("spherical", "diag", "full", "tied")
COVARS = {
    "spherical": torch.tensor([1.0, 0.5, 2.0]).double(),
    "diag": torch.tensor([[1.0, 2.0], [0.5, 1.0], [2.0, 1.0]]).double(),
    "full": torch.tensor([[[1.0, 0.3], [0.3, 2.0]], [[0.5, 0], [0, 1]], [[2, -0.5], [-0.5, 1]]]),
    "tied": torch.tensor([[1.0, 0.2], [0.2, 1.5]]).double(),
}


def model_of(kind: str, **options: Any) -> BaseHMM:
    """Return a model with parameters of its own, of a kind of covariances or of other emissions."""
    generator = torch.Generator().manual_seed(0)
    own: dict[str, Tensor] = {}
    if kind == "categorical":
        model: BaseHMM = CategoricalHMM(C, init_params="", n_features=4, **options)
        own["emissionprob_"] = torch.rand(C, 4, generator=generator).double().softmax(1)
    elif kind == "poisson":
        model = PoissonHMM(C, init_params="", **options)
        own["lambdas_"] = torch.tensor([[1.0, 5.0], [4.0, 2.0], [9.0, 9.0]]).double()
    else:
        model = GaussianHMM(C, kind, init_params="", **options)
        own["means_"] = torch.tensor([[0.0, 0.0], [3.0, 1.0], [-2.0, 4.0]]).double()
        own["covars_"] = COVARS[kind].double()
    for name, value in {"startprob_": START, "transmat_": MOVES, **own}.items():
        setattr(model, name, value)
    return model


MEANS = {"categorical": "emissionprob_", "poisson": "lambdas_"}
ALL = (*KINDS, *MEANS)


def values_of(kind: str, M: int, seed: int = 1) -> Tensor:
    return model_of(kind).sample(M, random_state=seed)[0].double()


def log_density(model: BaseHMM, row: Tensor) -> Tensor:
    """Return the log-density of what is there of a row, `[C]`, from torch.distributions."""
    there = ~row.isnan()
    if isinstance(model, CategoricalHMM):
        return model.emissionprob_[:, int(row)].log() if there.all() else torch.zeros(C).double()
    if isinstance(model, PoissonHMM):
        each = torch.distributions.Poisson(model.lambdas_).log_prob(row.nan_to_num())
        return each.where(there, 0.0).sum(1)
    if not there.any():
        return torch.zeros(C).double()
    covars = model.covars_[:, there][:, :, there]
    normal = torch.distributions.MultivariateNormal(model.means_[:, there], covars)
    return normal.log_prob(row[there])


def enumerated(model: BaseHMM, X: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of all paths with X, and the paths."""
    paths = torch.tensor(list(itertools.product(range(C), repeat=len(X))))
    emissions = torch.stack([log_density(model, row) for row in X])
    score = model.startprob_.log()[paths[:, 0]] + emissions[torch.arange(len(X)), paths].sum(1)
    return score + model.transmat_.log()[paths[:, :-1], paths[:, 1:]].sum(1), paths


def with_missing(kind: str, X: Tensor) -> Tensor:
    """Return values of which some are missing: whole rows, and single entries where they may be."""
    X = X.clone()
    X[1] = NAN
    if kind in ("spherical", "diag", "poisson"):
        X[0, 1] = X[3, 0] = NAN
    return X


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("kind", ALL)
def test_a_model_agrees_with_the_enumeration_of_paths(kind: str, is_missing: bool) -> None:
    model, X = model_of(kind), values_of(kind, 6)
    X = with_missing(kind, X) if is_missing else X
    scores, paths = enumerated(model, X)
    assert model.score(X) == pytest.approx(float(scores.logsumexp(0)), rel=1e-9)
    assert model.predict(X).tolist() == paths[scores.argmax()].tolist()
    assert model.decode(X)[0] == pytest.approx(float(scores.max()), rel=1e-9)
    found = torch.einsum(
        "p,ptc->tc", scores.softmax(0), torch.nn.functional.one_hot(paths, C).double()
    )
    torch.testing.assert_close(model.predict_proba(X), found)
    filtered = []
    for t in range(len(X)):
        scores, paths = enumerated(model, X[: t + 1])
        last = torch.nn.functional.one_hot(paths[:, -1], C).double()
        filtered.append(scores.softmax(0) @ last)
    torch.testing.assert_close(model.filter(X), torch.stack(filtered))
    forecast = model.forecast(X, 4)
    states = [filtered[-1]]
    for _ in range(4):
        states.append(states[-1] @ MOVES)
    torch.testing.assert_close(forecast.states, torch.stack(states[1:]))
    # A step that is to come is a step whose values are missing.
    longer = torch.cat([X, X.new_full((4, X.shape[1]), NAN)])
    torch.testing.assert_close(forecast.states, model.predict_proba(longer)[-4:])


def test_forecasts_are_means_of_the_emissions() -> None:
    assert model_of("categorical").forecast(values_of("categorical", 5), 2).means.shape == (2, 4)
    for kind, name in {"diag": "means_", **MEANS}.items():
        model = model_of(kind)
        found = model.forecast(values_of(kind, 5), 2)
        torch.testing.assert_close(found.means, found.states @ getattr(model, name))


@pytest.mark.parametrize("kind", ALL)
def test_sequences_of_different_lengths_are_those_alone(kind: str, monkeypatch: Any) -> None:
    model, lengths = model_of(kind), [7, 1, 12, 4]
    X = with_missing(kind, values_of(kind, sum(lengths)))
    monkeypatch.setattr(base, "CHUNK", 5 * 4 * C * C)  # so that `filter` takes chunks of 5 steps
    parts = X.split(lengths)
    assert model.score(X, lengths) == pytest.approx(sum(map(model.score, parts)), rel=1e-12)
    for method in ("predict_proba", "filter", "predict"):
        expected = torch.cat([getattr(model, method)(part) for part in parts])
        torch.testing.assert_close(getattr(model, method)(X, torch.tensor(lengths)), expected)
    together = model.forecast(X, 3, lengths)
    assert together.states.shape == (3, 4, C)
    for n, part in enumerate(parts):
        torch.testing.assert_close(together.states[:, n], model.forecast(part, 3).states)
        torch.testing.assert_close(together.means[:, n], model.forecast(part, 3).means)


@pytest.mark.parametrize("kind", ALL)
def test_em_with_missing_values_never_loses_likelihood(kind: str) -> None:
    X = values_of(kind, 60)
    gone = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.2
    X[gone] = NAN
    if kind in ("spherical", "diag", "poisson"):
        X[torch.rand(X.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = NAN
    options = {"covars_prior": 0.0} if kind in KINDS else {}
    model = model_of(kind, n_iter=30, tol=-1.0, **options).fit(X, [20, 40])
    history = torch.tensor(list(model.monitor_.history))
    assert len(history) == 30 and (history.diff() > -1e-9).all()
    assert model.score(X, [20, 40]) >= history[-1]


@pytest.mark.parametrize("kind", ALL)
def test_what_a_mask_leaves_out_is_missing(kind: str) -> None:
    X = values_of(kind, 40)
    missing = with_missing(kind, X.double())
    masked = np.ma.masked_array(X.numpy(), missing.isnan().numpy())
    model = model_of(kind)
    assert model.score(masked) == model.score(missing) != model.score(X)
    whole = np.ma.masked_array(X.numpy(), False)
    assert model.score(whole) == model.score(X)


def test_an_array_that_is_read_backwards() -> None:
    X, model = values_of("diag", 40), model_of("diag")
    assert model.score(X.numpy()[::-1]) == model.score(X.flip(0))


def test_missing_values_are_left_out_of_the_statistics() -> None:
    X = torch.tensor([[1.0, NAN], [3.0, 5.0], [NAN, NAN], [NAN, 9.0]])
    model = GaussianHMM(1, covars_prior=0.0, n_iter=1).fit(X)
    torch.testing.assert_close(model.means_, torch.tensor([[2.0, 7.0]]))
    torch.testing.assert_close(model.covars_, torch.tensor([[[1.0, 0.0], [0.0, 4.0]]]))
    rates = PoissonHMM(1, n_iter=1).fit(X).lambdas_
    torch.testing.assert_close(rates, torch.tensor([[2.0, 7.0]]))
    symbols = torch.tensor([0.0, NAN, 1.0, 1.0])[:, None]
    found = CategoricalHMM(1, n_iter=1).fit(symbols).emissionprob_
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 2 / 3]]))


@pytest.mark.parametrize("kind", ["diag", "poisson"])
def test_many_rows_have_the_log_likelihoods_of_few(kind: str, monkeypatch: Any) -> None:
    X = with_missing(kind, values_of(kind, 40))
    expected = model_of(kind).predict_proba(X)
    monkeypatch.setattr("partita.hmm.data.MANY", 1)
    torch.testing.assert_close(model_of(kind).predict_proba(X), expected)


@pytest.mark.parametrize("is_missing", [False, True])
def test_scans_that_look_symbols_up_count_what_gathered_emissions_count(is_missing: bool) -> None:
    """A CPU forms no emissions of symbols; the reference does."""
    X, lengths = values_of("categorical", 100), [40, 1, 50, 9]
    X = with_missing("categorical", X) if is_missing else X
    found = []
    for backend in ("auto", "reference"):
        model = model_of("categorical", n_iter=5, tol=-1e9)
        model.startprob_ = torch.tensor([0.0, 0.7, 0.3])
        model.emissionprob_[0, 1] = 0  # which leaves row 0 with a sum below 1
        model.emissionprob_ /= model.emissionprob_.sum(1, keepdim=True)
        with partita.backend(backend):
            model.fit(X, lengths)
        found.append((model.startprob_, model.transmat_, model.emissionprob_, model.monitor_))
    for ours, expected in zip(found[0][:3], found[1][:3], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-14)
    assert list(found[0][3].history) == pytest.approx(list(found[1][3].history), rel=1e-12)


def test_symbols_that_no_state_emits_have_no_likelihood() -> None:
    model = CategoricalHMM(2, n_features=3, init_params="", params="", n_iter=1)
    model.startprob_, model.transmat_ = [0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]
    model.emissionprob_ = [[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]]
    X = torch.tensor([0, 1, 2, 0, 1])[:, None]
    assert model.fit(X).monitor_.history[-1] == -torch.inf


@pytest.mark.parametrize("kind", ["full", "tied"])
def test_single_missing_entries_are_refused_with_full_matrices(kind: str) -> None:
    X = values_of(kind, 5)
    X[2, 0] = NAN
    with pytest.raises(ValueError, match="X: expected NaN in all columns of a row or in none"):
        model_of(kind).score(X)


def fresh(kind: str, **options: Any) -> BaseHMM:
    """Return a model that chooses its own starting values."""
    options["random_state"] = 4
    if kind in KINDS:
        return GaussianHMM(C, kind, **options)
    return {"categorical": CategoricalHMM, "poisson": PoissonHMM}[kind](C, **options)


@pytest.mark.filterwarnings("ignore:the model does not converge")
@pytest.mark.parametrize("kind", ALL)
def test_restarts_are_the_same_together_and_one_by_one(kind: str, monkeypatch: Any) -> None:
    X, lengths = with_missing(kind, values_of(kind, 40)), [15, 25]
    found = []
    for most in (0, 2**30):
        monkeypatch.setattr(base, "MOST_TOGETHER", {"cpu": most})
        found.append(fresh(kind, n_init=3, n_iter=40, tol=1e-3).fit(X, lengths))
    one, together = found
    np.testing.assert_allclose(one.monitor_.history, together.monitor_.history, rtol=1e-8)
    for name in one._letters.values():
        torch.testing.assert_close(one._stored(name), together._stored(name), rtol=1e-5, atol=1e-8)
    single = fresh(kind, n_iter=40, tol=1e-3).fit(X, lengths)
    assert one.monitor_.history[-1] >= single.monitor_.history[-1] - 1e-6 or kind in KINDS


@pytest.mark.parametrize("kind", ["diag", "full", "categorical", "poisson"])
def test_priors_of_each_state_hold_in_all_restarts(kind: str, monkeypatch: Any) -> None:
    by_state = 1 + torch.arange(C).double()[:, None]
    options: dict[str, Any] = {"transmat_prior": 1 + torch.eye(C), "startprob_prior": [1, 2, 3]}
    if kind == "categorical":
        options["emissionprob_prior"] = by_state.expand(C, 4)
    elif kind == "poisson":
        options["lambdas_prior"] = by_state
    else:
        options |= {"means_prior": by_state.expand(C, F), "means_weight": by_state}
        full = by_state[:, None] * torch.eye(F)
        options |= {"covars_prior": full if kind == "full" else by_state, "covars_weight": 2.0}
    found = []
    for most in (0, 2**30):
        monkeypatch.setattr(base, "MOST_TOGETHER", {"cpu": most})
        found.append(fresh(kind, n_init=3, n_iter=5, tol=-1e9, **options).fit(values_of(kind, 40)))
    np.testing.assert_allclose(*(model.monitor_.history for model in found), rtol=1e-8)
    for name in found[0]._letters.values():
        torch.testing.assert_close(*(model._stored(name) for model in found))


def test_a_subclass_chooses_the_starting_values_of_all_restarts() -> None:
    class Fixed(GaussianHMM):
        def initialize(self, X: Tensor, random: Any) -> dict[str, Tensor]:
            values = super().initialize(X, random)
            return values | {"means": torch.zeros_like(values["means"])}

    model = Fixed(C, n_init=2, n_iter=1, params="st", random_state=0).fit(values_of("diag", 30))
    assert (model.means_ == 0).all() and (model.covars_.diagonal(dim1=1, dim2=2) > 0).all()


def test_a_fit_keeps_the_restart_with_the_greatest_likelihood() -> None:
    X = values_of("categorical", 50)
    starts = fresh("categorical", n_init=4, n_features=4)._starting_values(base.batch_of(X, None))
    ends = []
    for r in range(4):
        model = CategoricalHMM(C, init_params="", n_iter=30, n_features=4)
        for name, value in starts.items():
            setattr(model, f"{name}_", value[r])
        ends.append(model.fit(X).monitor_)
    best = fresh("categorical", n_init=4, n_iter=30).fit(X).monitor_
    expected = max(ends, key=lambda monitor: monitor.history[-1])
    np.testing.assert_allclose(best.history, expected.history, rtol=1e-9)
    assert len({monitor.iter for monitor in ends}) > 1  # the restarts end at different iterations


def test_states_that_are_never_visited_keep_their_values() -> None:
    model = GaussianHMM(2, init_params="", covars_prior=0.0, n_iter=3, tol=-1.0)
    model.startprob_, model.transmat_ = [1.0, 0.0], [[1.0, 0.0], [0.4, 0.6]]
    model.means_, model.covars_ = [[0.0], [7.0]], [[1.0], [3.0]]
    model.fit(torch.tensor([[0.0], [1.0], [2.0]]))
    assert model.means_.flatten().tolist() == pytest.approx([1.0, 7.0])
    assert model.covars_.flatten().tolist() == pytest.approx([2 / 3, 3.0])
    torch.testing.assert_close(model.transmat_, torch.tensor([[1.0, 0.0], [0.4, 0.6]]))
    symbols = CategoricalHMM(2, init_params="", n_iter=2)
    symbols.startprob_, symbols.transmat_ = [1.0, 0.0], [[1.0, 0.0], [0.4, 0.6]]
    symbols.emissionprob_ = [[0.5, 0.5], [0.1, 0.9]]
    symbols.fit(np.array([[0], [1], [1], [1]]))
    np.testing.assert_allclose(symbols.emissionprob_, [[0.25, 0.75], [0.1, 0.9]])


def test_poisson_rates_with_a_prior_are_the_maximum_of_the_posterior() -> None:
    X = torch.tensor([[1.0], [4.0], [2.0]])
    rate = PoissonHMM(1, lambdas_prior=3.0, lambdas_weight=2.0, n_iter=1).fit(X).lambdas_
    grid = torch.linspace(0.01, 5, 100_000)
    posterior = torch.distributions.Poisson(grid).log_prob(X).sum(0)
    posterior = posterior + torch.distributions.Gamma(3.0, 2.0).log_prob(grid)
    assert rate.item() == pytest.approx(grid[posterior.argmax()].item(), abs=1e-3)


@pytest.mark.parametrize("kind", ALL)
def test_results_have_the_form_of_the_values(kind: str) -> None:
    X, model = values_of(kind, 30), model_of(kind, n_iter=3)
    expected = model.predict_proba(X)
    for given in (X.float(), X.numpy(), X.numpy().astype(np.float32), X.tolist()):
        found = model.predict_proba(given)
        assert isinstance(found, Tensor if isinstance(given, Tensor) else np.ndarray)
        is_single = "float32" in str(getattr(given, "dtype", ""))
        assert str(found.dtype).endswith("float32" if is_single else "float64")
        np.testing.assert_allclose(found, expected, atol=1e-4)
        fitted = copy.deepcopy(model).fit(given)
        for name in fitted._letters.values():
            value = getattr(fitted, f"{name}_")
            assert type(value) is type(found) and value.dtype == found.dtype
        assert type(fitted.forecast(given, 2).means) is type(found)
        assert fitted.predict(given).dtype in (torch.int64, np.int64)
        assert type(fitted.sample(3, random_state=0)[0]) is type(found)
    batch = X.t().contiguous().t()  # other strides
    torch.testing.assert_close(model.predict_proba(batch), expected)


def test_values_are_not_written_to() -> None:
    X = with_missing("diag", values_of("diag", 20))
    before = X.clone()
    model = model_of("diag", n_iter=3)
    means = model.means_.clone()
    copy.copy(model).fit(X, [8, 12]).filter(X)
    torch.testing.assert_close(X, before, equal_nan=True)
    torch.testing.assert_close(model.means_, means)


def test_values_far_from_zero_lose_no_digits() -> None:
    X = values_of("diag", 200)
    near, far = (
        GaussianHMM(C, random_state=0, n_iter=5).fit(X + shift, [190, 5, 5]) for shift in (0.0, 1e6)
    )
    torch.testing.assert_close(far.covars_, near.covars_, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(far.means_ - 1e6, near.means_, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_samples_have_the_distribution_of_the_model(kind: str) -> None:
    model = model_of(kind)
    X, states = model.sample(20_000, random_state=0)
    assert X.shape == (20_000, 1 if kind == "categorical" else F) and states.shape == (20_000,)
    share = torch.bincount(states, minlength=C) / len(states)
    torch.testing.assert_close(
        share.double(), model.get_stationary_distribution(), atol=0.03, rtol=0
    )
    pairs = torch.zeros(C, C).index_put((states[:-1], states[1:]), torch.tensor(1.0), True)
    torch.testing.assert_close((pairs / pairs.sum(1, True)).double(), MOVES, atol=0.03, rtol=0)
    means = getattr(model, MEANS.get(kind, "means_"))
    for c in range(C):
        own = X[states == c].double()
        if kind == "categorical":
            own = torch.nn.functional.one_hot(own[:, 0].long(), 4).double()
        torch.testing.assert_close(own.mean(0), means[c], atol=0.15, rtol=0)
        if kind in KINDS:
            torch.testing.assert_close(own.T.cov(), model.covars_[c], atol=0.15, rtol=0)
    assert all(
        torch.equal(a, b) for a, b in zip(model.sample(9, 1), model.sample(9, 1), strict=True)
    )
    assert model.sample(5, random_state=torch.Generator().manual_seed(0), currstate=2)[1][0] == 2


def test_covariances_are_set_in_their_own_shape_and_read_as_matrices() -> None:
    for kind in KINDS:
        model = model_of(kind)
        assert model.covars_.shape == (C, F, F)
        torch.testing.assert_close(model.fit(values_of(kind, 40)).covars_, model.covars_.mT)
        model.covars_ = COVARS[kind].tolist()
        assert isinstance(model.covars_, np.ndarray)
    for kind, wrong, message in (
        ("diag", [1.0, 1.0, 1.0], r"covars_: expected shape \[C, F\] with C = 3"),
        ("diag", [[1.0, 0.0]] * 3, "covars_: expected variances above 0"),
        ("spherical", [1.0, 1.0], r"covars_: expected shape \[C\]"),
        ("full", [[[1.0, 2.0], [2.0, 1.0]]] * 3, "symmetric and positive definite"),
        ("tied", [[1.0, 0.5], [0.0, 1.0]], "symmetric and positive definite"),
    ):
        with pytest.raises(ValueError, match=message):
            model_of(kind).covars_ = wrong


def test_parameters_that_fit_overwrites_are_named() -> None:
    model = model_of("diag", n_iter=1)
    model.init_params = "sm"
    X = values_of("diag", 30)
    with pytest.warns(UserWarning, match="was set, and fit overwrites it") as caught:
        model.fit(X)
    assert [str(w.message).partition(" ")[0] for w in caught] == ["startprob_", "means_"]
    with pytest.warns(UserWarning, match="X has 4 values, fewer than the 20 free parameters"):
        model_of("diag", n_iter=1).fit(X[:2])


def test_only_the_parameters_of_params_change() -> None:
    X = values_of("full", 50)
    names = {"s": "startprob_", "t": "transmat_", "m": "means_", "c": "covars_"}
    for letter, name in names.items():
        before, model = model_of("full"), model_of("full", params=letter, n_iter=2).fit(X)
        for other in names.values():
            same = torch.equal(getattr(model, other), getattr(before, other))
            assert same is (other != name)


class ThresholdMonitor(ConvergenceMonitor):
    @property
    def converged(self) -> bool:
        return self.iter == 4


def test_a_monitor_of_ones_own_ends_the_fit(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of("diag", n_iter=50)
    model.monitor_ = ThresholdMonitor(0.0, 50, True)
    model.fit(values_of("diag", 30))
    assert type(model.monitor_) is ThresholdMonitor and model.monitor_.iter == 4
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"]
    assert lines[0].split()[2] == "+nan"
    assert float(lines[3].split()[1]) == pytest.approx(model.monitor_.history[-1])
    assert "iter=4" in repr(model.monitor_)


def test_a_long_fit_shows_its_progress_on_a_terminal(
    monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    X = values_of("diag", 30)
    model_of("diag", n_iter=3, tol=-1.0).fit(X)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("partita.hmm.monitor.QUIET_SECONDS", -1.0)
    fresh("diag", n_iter=3, tol=-1.0, n_init=2).fit(X)
    text = capsys.readouterr().err
    assert "[3/3] log-likelihood -" in text and "2 of 2 starts" in text


@pytest.mark.filterwarnings("ignore")
def test_a_falling_likelihood_is_said() -> None:
    model = model_of("diag", means_prior=100.0, means_weight=1000.0, n_iter=3)
    with pytest.warns(UserWarning, match="the model does not converge: the log-likelihood fell"):
        model.fit(values_of("diag", 30))


class StudentHMM(BaseHMM):
    """Student-t emissions with given degrees of freedom, by the weights of a scale mixture."""

    emission_parameters = {"m": "locations", "c": "scales"}  # noqa: RUF012
    freedom = 4.0

    def initialize(self, X: Tensor, random: Any) -> dict[str, Tensor]:
        rows = random.choice(len(X), self.n_components, replace=False)
        scale = X.std(0).expand(self.n_components, X.shape[1])
        return {"locations": X[torch.from_numpy(rows)], "scales": scale}

    def log_likelihood(self, X: Tensor, locations: Tensor, scales: Tensor) -> Tensor:
        student = torch.distributions.StudentT(self.freedom, locations, scales, validate_args=False)
        return student.log_prob(X[:, None]).sum(2)

    def statistics(
        self, X: Tensor, posteriors: Tensor, locations: Tensor, scales: Tensor
    ) -> dict[str, Tensor]:
        squares = ((X[:, None] - locations) / scales).square()
        weights = posteriors[:, :, None] * (self.freedom + 1) / (self.freedom + squares)
        return {
            "n": posteriors.sum(0)[:, None],
            "w": weights.sum(0),
            "wx": (weights * X[:, None]).sum(0),
            "wxx": (weights * X[:, None].square()).sum(0),
        }

    def update(
        self, statistics: dict[str, Tensor], locations: Tensor, scales: Tensor
    ) -> dict[str, Tensor]:
        n, w, wx, wxx = (statistics[name] for name in ("n", "w", "wx", "wxx"))
        locations = wx / w
        return {"locations": locations, "scales": ((wxx - wx * locations) / n).sqrt()}


@pytest.mark.parametrize("n_init", [1, 3])
def test_emissions_of_ones_own(n_init: int) -> None:
    X = values_of("diag", 80)
    X[::20] *= 5.0
    X[5] = NAN
    model = StudentHMM(C, random_state=0, n_init=n_init, n_iter=10, tol=-1.0).fit(X, [30, 50])
    assert (torch.tensor(list(model.monitor_.history)).diff() > -1e-9).all()
    assert model.locations_.shape == model.scales_.shape == (C, F)
    assert model.predict(X).shape == (80,) and model.aic(X) > 0
    with pytest.raises(NotImplementedError, match=r"StudentHMM\.means_of"):
        model.forecast(X, 2)
    with pytest.raises(ValueError, match="X: expected NaN in all columns"):
        model.score(torch.tensor([[NAN, 1.0]]))


def test_a_model_can_be_saved_and_copied() -> None:
    X = values_of("diag", 30)
    model = fresh("diag", n_iter=2).fit(X)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert other.score(X) == model.score(X)


def test_no_gradient_is_recorded() -> None:
    X = values_of("diag", 30).requires_grad_()
    model = fresh("diag", n_iter=2).fit(X)
    assert not any(getattr(model, f"{name}_").requires_grad for name in model._letters.values())
    assert not model.predict_proba(X).requires_grad


@pytest.mark.parametrize(
    ("error", "kind", "X"),
    [
        ("ValueError: X: expected shape", "diag", torch.zeros(3)),
        ("ValueError: X: expected shape", "diag", torch.zeros(0, 2)),
        ("ValueError: X: expected finite values", "diag", [[1.0, float("inf")]]),
        ("TypeError: X: expected numbers", "diag", torch.zeros(2, 2).bool()),
        ("TypeError: X: expected a tensor", "diag", [["a", "b"]]),
        ("ValueError: X: expected symbols, whole numbers", "categorical", [[0.5]]),
        ("ValueError: X: expected symbols, whole numbers", "categorical", [[-1]]),
        ("ValueError: X: expected symbols below 4", "categorical", [[4]]),
        ("ValueError: X: expected one column", "categorical", [[1, 2]]),
        ("ValueError: X: expected counts", "poisson", [[1, -2]]),
    ],
)
def test_wrong_values_are_named(error: str, kind: str, X: Any) -> None:
    for method in ("score", "fit"):
        with raises(error):
            getattr(model_of(kind), method)(X)


@pytest.mark.parametrize(
    ("error", "call"),
    {
        "ValueError: X: expected 2 columns, got 3": (
            lambda X: fresh("diag").fit(X).score(torch.zeros(4, 3))
        ),
        "ValueError: X: expected values, got NaN alone": lambda X: fresh("diag").fit([[NAN, NAN]]),
        "ValueError: lengths: expected a sum of 9": lambda X: model_of("diag").score(X, [1, 2]),
        "ValueError: lengths: expected lengths of at least 1": (
            lambda X: model_of("diag").score(X, [9, 0])
        ),
        "TypeError: lengths: expected": lambda X: model_of("diag").score(X, [9.0]),
        "AttributeError: startprob_: expected a value; call fit first": (
            lambda X: GaussianHMM(2).score(X)
        ),
        "ValueError: n_components: expected 1 or more": lambda X: GaussianHMM(0),
        "ValueError: n_init: expected 1 or more": lambda X: GaussianHMM(2, n_init=0),
        "ValueError: covariance_type: expected": lambda X: GaussianHMM(2, "round"),
        "ValueError: algorithm: expected": lambda X: GaussianHMM(2, algorithm="best"),
        "ValueError: algorithm: expected .*": (
            lambda X: model_of("diag").decode(X, algorithm="best")
        ),
        "ValueError: implementation: expected": lambda X: GaussianHMM(2, implementation="exp"),
        "ValueError: currstate: expected a state from 0 to 2": (
            lambda X: model_of("diag").sample(2, currstate=3)
        ),
        "ValueError: steps: expected 1 or more": lambda X: model_of("diag").forecast(X, 0),
        "TypeError: random_state: expected": lambda X: GaussianHMM(2, random_state="x").fit(X),
    }.items(),
)
def test_wrong_arguments_are_named(error: str, call: Any) -> None:
    with raises(error):
        call(values_of("diag", 9))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("startprob_", [0.5, 0.5], r"startprob_: expected shape \[3\]"),
        ("startprob_", [0.5, 0.6, 0.0], "startprob_: expected probabilities"),
        ("transmat_", [[0.5, 0.6, -0.1]] * 3, "transmat_: expected probabilities"),
        ("means_", [[0.0, 1.0]], r"means_: expected shape \[3, 2\]"),
    ],
)
def test_wrong_parameters_are_named(name: str, value: Any, message: str) -> None:
    model = model_of("diag")
    setattr(model, name, value)
    for call in (model.score, model.fit):
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ALL)
def test_a_gpu_gives_what_the_cpu_gives(kind: str, dtype: torch.dtype) -> None:
    X, lengths = with_missing(kind, values_of(kind, 700)).to(dtype), [300, 1, 399]
    for n_init in (1, 4):
        options = {"n_init": n_init, "n_iter": 8, "tol": -1.0}
        here, there = (fresh(kind, **options).fit(x, lengths) for x in (X, X.cuda()))
        np.testing.assert_allclose(here.monitor_.history, there.monitor_.history, rtol=1e-5)
        for method in ("predict_proba", "filter"):
            found = getattr(there, method)(X.cuda(), lengths)
            assert found.is_cuda and found.dtype == dtype
            torch.testing.assert_close(
                found.cpu(), getattr(here, method)(X, lengths), atol=1e-3, rtol=1e-3
            )
    assert there.sample(5, random_state=0)[0].is_cuda
