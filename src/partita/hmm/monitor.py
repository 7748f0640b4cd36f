"""The progress of expectation maximization: its history, its end, and what a user sees of it."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence

from ..cli.console import Progress

WIGGLE = 2.0**-26  # nats, by which a log-likelihood may fall without a warning
QUIET_SECONDS = 3.0  # work that takes less shows no progress


class ConvergenceMonitor:
    """The log-likelihoods of a fit, and whether it has converged.

    Args:
        tol: a fit ends when the log-likelihood gains less than this, in nats.
        n_iter: the number of iterations at which it ends.
        verbose: whether each iteration writes a line to the error stream: its number, the
            log-likelihood, and the gain.

    Its attribute `history` is a deque of the log-likelihoods before each update, and `iter` the
    number of iterations. A subclass may define `converged`; an instance of it that a model has as
    `monitor_` before `fit` is used.

    Raises:
        TypeError: an argument is missing.

    Source: `hmmlearn.base.ConvergenceMonitor`.

    Example:
        >>> from partita.hmm import ConvergenceMonitor
        >>> monitor = ConvergenceMonitor(tol=0.1, n_iter=100, verbose=False)
        >>> for log_prob in (-20.0, -10.0, -9.95):
        ...     monitor.report(log_prob)
        >>> monitor.converged, monitor.iter
        (True, 3)
    """

    def __init__(self, tol: float, n_iter: int, verbose: bool) -> None:
        self.tol, self.n_iter, self.verbose = tol, n_iter, verbose
        self.history: deque[float] = deque()
        self.iter = 0

    def __repr__(self) -> str:
        return (
            f"ConvergenceMonitor(tol={self.tol}, n_iter={self.n_iter}, verbose={self.verbose},"
            f" iter={self.iter}, history={list(self.history)})"
        )

    def _reset(self) -> None:
        """Forget the fit before."""
        self.iter = 0
        self.history.clear()

    def report(self, log_prob: float) -> None:
        """Add the log-likelihood of one iteration, and warn where it falls.

        Args:
            log_prob: the log-likelihood before the update of the iteration, in nats.

        Raises:
            TypeError: log_prob is no number.
        """
        gain = log_prob - self.history[-1] if self.history else math.nan
        if self.verbose:
            print(f"{self.iter + 1:>10d} {log_prob:>16.8f} {gain:>+16.8f}", file=sys.stderr)
        if gain < -WIGGLE - 2.0**-40 * abs(log_prob):
            warnings.warn(
                f"the model does not converge: the log-likelihood fell by {-gain:.3g} nats, from"
                f" {self.history[-1]:.8g} to {log_prob:.8g}, in iteration {self.iter + 1}",
                stacklevel=3,
            )
        self.history.append(log_prob)
        self.iter += 1

    @property
    def converged(self) -> bool:
        """Return whether the last gain is below `tol`, or `n_iter` iterations are done."""
        return self.iter == self.n_iter or (
            len(self.history) > 1 and self.history[-1] - self.history[-2] < self.tol
        )


class FitProgress(Progress):
    """The progress of a fit on a terminal, once it has taken some seconds."""

    def show(self, log_probs: Sequence[float], restarts: int) -> None:
        """Show the iteration that ends, and the best log-likelihood of the restarts in it."""
        self.advance()
        if sys.stderr.isatty() and time.monotonic() - self._start > QUIET_SECONDS:
            starts = f", {len(log_probs)} of {restarts} starts" if restarts > 1 else ""
            self.say(f"log-likelihood {max(log_probs):.6g}{starts}")
