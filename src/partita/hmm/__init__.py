"""Hidden Markov models with hmmlearn's constructors, attributes and methods, on CPU and GPU.

The expectation step is log Z of a dense linear chain and its gradients, the posteriors.
"""

from __future__ import annotations

from torch.serialization import add_safe_globals as _add_safe_globals

from .base import BaseHMM, Forecast
from .discrete import CategoricalHMM, PoissonHMM
from .gaussian import GaussianHMM
from .monitor import ConvergenceMonitor

__all__ = [
    "BaseHMM",
    "CategoricalHMM",
    "ConvergenceMonitor",
    "Forecast",
    "GaussianHMM",
    "PoissonHMM",
]

# Users meet these objects as `partita.hmm.X`, so this is what error messages and pickles name.
for _name in __all__:
    _object = globals()[_name]
    _object.__module__ = __name__

# By default `torch.load` reads the classes that it knows.
_add_safe_globals([Forecast])
