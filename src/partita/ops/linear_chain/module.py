"""The conditional random field of a tagger as a module, which `partita.nn` shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...paths.inputs import checked_mask, full_lengths, steps_first
from ...runtime import checks
from ...runtime.constants import constant
from .api import LinearChain, LinearPath, linear_chain
from .tags import checked_labels, forbidden_moves, tag_rules


class CRF(torch.nn.Module):
    """A linear-chain conditional random field with the interface of `torchcrf.CRF`.

    Args:
        num_tags: the number of tags, C.
        batch_first: whether emissions, tags and masks are `[N, T, ...]` instead of `[T, N, ...]`,
            and what `nbest` and `confidences` return too.
        labels: the names of the tags, as "O", "B-PER", "I-PER".
        constraints: "BIO" or "BIOES": tags follow each other, start and end as the scheme of
            their `labels` allows. All others have the score -inf, whatever the parameters are.

    The parameters are `start_transitions` and `end_transitions`, `[C]`, and `transitions`,
    `[C, C]`, from and to, in nats. State dictionaries of `torchcrf.CRF` load. Constraints are no
    part of them, so parameters that were trained without constraints may decode with them.

    A mask may leave out any tokens of a sequence, as the first one and parts of words. Tokens
    whose mask is True follow each other as if there were no others. The rest reaches no result.

    Raises:
        TypeError, ValueError: `num_tags` is not a positive integer, there is not one name for each
            tag, the scheme is unknown, or a name is none of it.

    Source: the class of pytorch-crf 0.7.2; Lafferty et al., Conditional random fields, 2001. The
    method is the one of `partita.linear_chain`.

    Example:
        >>> import torch, partita
        >>> crf = partita.nn.CRF(3, labels=["O", "B", "I"], constraints="BIO")
        >>> emissions = torch.tensor([[[9.0, 0.0, 0.0]], [[0.0, 7.0, 8.0]], [[0.0, 0.0, 9.0]]])
        >>> crf.decode(emissions)  # I may not follow O
        [[0, 1, 2]]
        >>> crf.decode(emissions, mask=torch.tensor([[False], [True], [True]]))
        [[1, 2]]
        >>> loss = -crf(emissions, torch.tensor([[0], [1], [2]]), reduction="token_mean")
    """

    def __init__(
        self,
        num_tags: int,
        batch_first: bool = False,
        *,
        labels: Sequence[str] | None = None,
        constraints: str | None = None,
    ) -> None:
        checks.python_int("num_tags", num_tags)
        if num_tags <= 0:
            raise ValueError(f"num_tags: expected a number of tags, 1 or more, got {num_tags}")
        super().__init__()
        self.num_tags, self.batch_first = num_tags, batch_first
        self.labels = checked_labels(labels, num_tags)
        self.constraints = constraints
        # No buffer holds the rules: a module that is made on the meta device would lose it.
        self._rules = tag_rules(self.labels, constraints)
        self.start_transitions = torch.nn.Parameter(torch.empty(num_tags))
        self.end_transitions = torch.nn.Parameter(torch.empty(num_tags))
        self.transitions = torch.nn.Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly between -0.1 and 0.1.

        Example:
            >>> import torch, partita
            >>> crf = partita.nn.CRF(3)
            >>> crf.reset_parameters()
            >>> bool(crf.transitions.abs().max() <= 0.1)
            True
        """
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.1, 0.1)

    def chain(self, emissions: Tensor, mask: Tensor | None = None) -> LinearChain:
        """Return the `LinearChain` of a batch, which has posteriors, samples and entropies.

        Args:
            emissions: `[T, N, C]`, or `[N, T, C]` with `batch_first`.
            mask: `[T, N]`, or `[N, T]` with `batch_first`, bool or uint8: which tokens count, at
                least one in each sequence; all if None.

        Returns:
            The chain, whose first dimension is T in any case. The tokens that count come first.

        Raises:
            TypeError, ValueError: as in `partita.LinearChain`, but for holes of a mask.

        Example:
            >>> import torch, partita
            >>> crf = partita.nn.CRF(3, batch_first=True)
            >>> crf.chain(torch.zeros(2, 7, 3)).state_marginals().shape
            torch.Size([7, 2, 3])
        """
        return self._chain_and_order(emissions, mask)[0]

    def _chain_and_order(
        self, emissions: Tensor, mask: Tensor | None
    ) -> tuple[LinearChain, Tensor | None]:
        """Return the chain, and which tokens its tokens are, `[T, N]`; None for the same."""
        emissions = steps_first(emissions, self.batch_first)
        if emissions.shape[2] != self.num_tags:
            raise ValueError(
                f"emissions: expected {self.num_tags} tags in the last dimension,"
                f" got {emissions.shape[2]}"
            )
        order = counts = None
        if mask is not None:
            checks.tensor("mask", mask)
            mask = mask.bool() if mask.dtype == torch.uint8 else mask
            counts = checked_mask(emissions, mask, self.batch_first)
            # On a GPU the host does not wait to look at a mask: a stable sort serves all.
            is_prefix = checks.can_check_values(counts) and not (counts[1:] & ~counts[:-1]).any()
            if not is_prefix:
                order = (~counts).byte().argsort(dim=0, stable=True)
                emissions = emissions.take_along_dim(order[..., None], 0)
                counts = counts.gather(0, order)
        moves: Tensor = self.transitions
        start: Tensor = self.start_transitions
        end: Tensor = self.end_transitions
        if self._rules is not None:
            forbidden = constant(forbidden_moves, *self._rules, device=emissions.device)
            moves = moves.masked_fill(forbidden[:-1, :-1], -torch.inf)
            start = start.masked_fill(forbidden[-1, :-1], -torch.inf)
            end = end.masked_fill(forbidden[:-1, -1], -torch.inf)
        return linear_chain(emissions, moves, start, end, mask=counts), order

    def forward(
        self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None, reduction: str = "sum"
    ) -> Tensor:
        """Compute the log-likelihood of tags in nats; the loss is its negative.

        Args:
            emissions, mask: as in `chain`.
            tags: `[T, N]`, or `[N, T]` with `batch_first`; those of tokens that do not count are
                ignored, and may be -100.
            reduction: `none`, `sum`, `mean` over the sequences, or `token_mean` over the tokens
                that count.

        Returns:
            A number, or `[N]` with `reduction="none"`.

        Raises:
            TypeError, ValueError: as in `chain`.
            IndexError: a tag is out of range.
            ValueError: the constraints forbid the tags. On a GPU this and the range are checked
                only with `PARTITA_CHECK=1`, and otherwise give -inf.
        """
        checks.choice("reduction", reduction, ("none", "sum", "mean", "token_mean"))
        chain, order = self._chain_and_order(emissions, mask)
        checks.integer("tags", tags)
        checks.shape("tags", tags, emissions.shape[:2], "that of the emissions")
        are_checked = checks.can_check_values(tags)
        if are_checked:
            counted = tags if mask is None else tags.masked_fill(mask == 0, 0)
            checks.labels("tags", counted, self.num_tags, checks.NOTHING_IGNORED)
        tags = tags.mT if self.batch_first else tags
        tags = tags if order is None else tags.gather(0, order)
        if are_checked:
            self._check_moves(tags, chain, order)
        log_likelihood = chain.log_prob(tags)
        if reduction == "none":
            return log_likelihood
        if reduction == "mean":
            return log_likelihood.mean()
        total = log_likelihood.sum()
        if reduction == "sum":
            return total
        return total / (tags.numel() if chain.lengths is None else chain.lengths.sum())

    def _check_moves(self, tags: Tensor, chain: LinearChain, order: Tensor | None) -> None:
        """Raise for tags `[T, N]`, in the order of the chain, that the constraints forbid."""
        if self._rules is None or self.labels is None:
            return
        (T, N), outside = tags.shape, self.num_tags
        active = torch.arange(T, device=tags.device)[:, None] < full_lengths(tags, chain.lengths)
        inside = torch.where(active, tags.long(), outside)
        end = inside.new_full((1, N), outside)
        before, after = torch.cat([end, inside]), torch.cat([inside, end])
        forbidden = constant(forbidden_moves, *self._rules, device=tags.device)
        if (index := checks.first_index(forbidden[before, after])) is None:
            return
        names = list(map(repr, self.labels))
        entered = [*names, "the end"][after[index]]
        left = [*names, "the start"][before[index]]
        t, n = min(index[0], int(active[:, index[1]].sum()) - 1), index[1]
        t = t if order is None else int(order[t, n])
        raise ValueError(
            f"tags: expected what constraints={self.constraints!r} allow, got {entered} after"
            f" {left} at {[n, t] if self.batch_first else [t, n]}"
        )

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """Return the best tags of the tokens that count as lists; the host waits for the device.

        `chain(emissions, mask).viterbi().states` stays on the device, with those tokens in front.

        Args:
            emissions, mask: as in `chain`.

        Raises:
            TypeError, ValueError: as in `chain`.
        """
        states = self.chain(emissions, mask).viterbi().states.T.tolist()
        return [[state for state in row if state >= 0] for row in states]

    def nbest(self, emissions: Tensor, k: int, mask: Tensor | None = None) -> LinearPath:
        """Return the k best taggings of each sequence, from the best on.

        Args:
            emissions, mask: as in `chain`.
            k: the number of taggings.

        Returns:
            The scores `[k, N]` and the states `[k, T, N]`, or `[k, N, T]` with `batch_first`, as in
            `LinearChain.nbest`; -1 for tokens that do not count.

        Raises:
            TypeError, ValueError: as in `chain` and in `LinearChain.nbest`.

        Example:
            >>> import torch, partita
            >>> crf = partita.nn.CRF(2, batch_first=True)
            >>> emissions = torch.tensor([[[9.0, 0.0], [0.0, 0.0], [0.0, 5.0]]])
            >>> mask = torch.tensor([[True, False, True]])
            >>> crf.nbest(emissions, 2, mask).states.tolist()
            [[[0, -1, 1]], [[0, -1, 0]]]
        """
        chain, order = self._chain_and_order(emissions, mask)
        best = chain.nbest(k)
        return best._replace(states=self._of_tokens(best.states, order))

    def confidences(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the posterior probability of each tag that `decode` finds; 0 for other tokens.

        It is differentiable. `chain(emissions, mask).state_marginals()` has that of all tags.

        Args:
            emissions, mask: as in `chain`.

        Returns:
            `[T, N]`, or `[N, T]` with `batch_first`.

        Raises:
            TypeError, ValueError: as in `chain`.

        Example:
            >>> import torch, partita
            >>> crf = partita.nn.CRF(2)
            >>> crf.confidences(torch.tensor([[[0.0, 50.0]], [[50.0, 0.0]]])).tolist()
            [[1.0], [1.0]]
        """
        chain, order = self._chain_and_order(emissions, mask)
        states = chain.viterbi().states.clamp(min=0)
        found = chain.state_marginals().gather(2, states[..., None])[..., 0]
        return self._of_tokens(found, order)

    def _of_tokens(self, values: Tensor, order: Tensor | None) -> Tensor:
        """Return values of the tokens of a chain, `[..., T, N]`, in the layout of the module."""
        if order is not None:
            values = values.gather(-2, order.argsort(0).expand_as(values))
        return values.mT if self.batch_first else values

    def extra_repr(self) -> str:
        """Return the options that torch prints with the module."""
        rules = "" if self.constraints is None else f", constraints={self.constraints!r}"
        return f"num_tags={self.num_tags}, batch_first={self.batch_first}{rules}"
