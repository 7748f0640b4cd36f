"""Searches that pages of migration wrap around modules of other libraries, with stand-ins."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.transducers import BLANK, Transducer, transducer
from torch import Tensor

import partita

PAGES = Path(__file__).parents[2] / "docs" / "migrate"


def function_of(page: str) -> Any:
    """Return the function `searched` of a page."""
    text = (PAGES / page).read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(def searched.*?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {"partita": partita, "torch": torch}
    exec(block, namespace)
    return namespace["searched"]


def assert_same(found: Any, expected: Any) -> None:
    for name in ("tokens", "lengths", "scores", "steps"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert int(expected.lengths.sum()) > 4


def at_zero(network: Transducer) -> Transducer:
    """Return a network with frames that may be read past the lengths."""
    return network._replace(encoder=network.encoder.nan_to_num(0.0))


@pytest.mark.parametrize("durations", [None, (0, 1, 2)])
def test_nemo(durations: tuple[int, ...] | None) -> None:
    """Its encoder puts the frames last, and its predictor reads and returns `[B, U, ...]`."""
    network = at_zero(transducer(durations=durations))

    class Decoder:
        def predict(self, y: Tensor, state: Any, add_sos: bool) -> Any:
            assert y.ndim == 2 and not add_sos
            output, state = network.predict(y[:, 0], state)
            return output[:, None], state

    class Joint:
        def project_encoder(self, x: Tensor) -> Tensor:
            return x + 1

        def project_prednet(self, x: Tensor) -> Tensor:
            assert x.ndim == 3
            return x - 1

        def joint_after_projection(self, f: Tensor, g: Tensor) -> Tensor:
            logits: Tensor = network.join.head((f[:, :, None] + g[:, None]).tanh())
            return logits.log_softmax(-1)  # of tokens and durations together, on a CPU

    searched = function_of("nemo.md")
    encoded = network.encoder.transpose(1, 2)
    found = searched(Decoder(), Joint(), encoded, network.lengths, BLANK, durations)
    assert_same(found, network.search(partita.rnnt_beam_search, beam_width=4))


def test_torchaudio() -> None:
    """The joint of its `RNNT` returns `[B, T, U, V]` and both lengths."""
    network = at_zero(transducer(lengths=(9, 7)))

    class Model:
        def transcribe(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            return x, lengths

        def predict(self, targets: Tensor, lengths: Tensor, state: Any) -> Any:
            assert targets.shape == (len(lengths), 1) and (lengths == 1).all()
            output, states = network.predict(targets[:, 0], state and unpacked(state))
            return output[:, None], lengths, packed(states)

        def join(self, x: Tensor, sizes: Tensor, y: Tensor, counts: Tensor) -> Any:
            assert (sizes == x.shape[1]).all() and (counts == y.shape[1]).all()
            return network.join.head((x[:, :, None] + y[:, None]).tanh()), sizes, counts

    def packed(state: Any) -> list[list[Tensor]]:
        """Return a list with the two tensors of each layer, `[B, D]`."""
        return [list(layer) for layer in zip(*(x.unbind() for x in state), strict=True)]

    def unpacked(state: list[list[Tensor]]) -> Any:
        return tuple(torch.stack(each) for each in zip(*state, strict=True))

    lengths = torch.tensor(network.lengths)
    found = function_of("torchaudio.md")(Model(), network.encoder, lengths, BLANK, 4)
    assert_same(found, network.search(partita.rnnt_beam_search, beam_width=4, nbest=4))
