"""Functions of the pages that are called by or call modules of other libraries, or stand-ins."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.transducers import BLANK, Stateless, Transducer, transducer
from torch import Tensor

import partita

DOCS = Path(__file__).parents[2] / "docs"


def function_of(page: str, name: str = "searched") -> Any:
    """Return a function of a page, with which a block of code begins."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"```python\n(def {name}\b.*?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {"partita": partita, "torch": torch}
    exec(block, namespace)
    return namespace[name]


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

    searched = function_of("migrate/nemo.md")
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
    searched = function_of("migrate/torchaudio.md")
    found = searched(Model(), network.encoder, lengths, BLANK, 4)
    assert_same(found, network.search(partita.rnnt_beam_search, beam_width=4, nbest=4))


def test_icefall() -> None:
    """Its stateless decoder reads the last labels, -1 before the first."""
    network = at_zero(transducer(Stateless))

    class Decoder:
        context_size = 2

        def __call__(self, y: Tensor, need_pad: bool) -> Tensor:
            assert y.shape[1] == self.context_size and not need_pad
            before, last = y.clamp(min=0).unbind(1)
            return network.predict(last, before)[0][:, None]

    class Joiner:
        def encoder_proj(self, x: Tensor) -> Tensor:
            return x + 1

        def decoder_proj(self, x: Tensor) -> Tensor:
            return x - 1

        def __call__(self, encoder: Tensor, decoder: Tensor, project_input: bool) -> Tensor:
            assert encoder.ndim == decoder.ndim and not project_input
            return network.join(encoder, decoder)

    found = function_of("migrate/k2.md")(
        Decoder(), Joiner(), network.encoder, network.lengths, BLANK, beam_width=4
    )
    assert_same(found, network.search(partita.rnnt_beam_search, beam_width=4))


@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert", "Parakeet"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_models_of_transformers(name: str, reduction: str) -> None:
    """The loss of the page, set as the loss function of a model, is the model's own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "vocab_size": 6}
    options = {"ctc_loss_reduction": reduction, "pad_token_id": 5}
    if name == "Parakeet":
        encoder = {**sizes, "subsampling_conv_channels": 4}
        config = transformers.ParakeetCTCConfig(encoder_config=encoder, vocab_size=6, **options)
        inputs, mask, padding = torch.randn(2, 64, 80), torch.ones(2, 64, dtype=torch.int64), 5
    else:
        layers = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,)}
        layers |= {"num_feat_extract_layers": 1, "num_conv_pos_embedding_groups": 2}
        config = getattr(transformers, f"{name}Config")(**sizes, **layers, **options)
        inputs, mask, padding = torch.randn(2, 200), torch.ones(2, 200, dtype=torch.int64), -100
    mask[1, len(mask[1]) * 3 // 4 :] = 0
    model = getattr(transformers, f"{name}ForCTC")(config).eval()
    labels = torch.tensor([[1, 3, 3, 2], [4, 0, padding, padding]])
    results = []
    for loss_function in (model.loss_function, function_of("transformers.md", "ctc_loss")):
        model.loss_function = loss_function
        loss = model(inputs, attention_mask=mask, labels=labels).loss
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters())[-2:])))
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-4)
    assert results[0][0].isfinite()
