"""Decoding of Parakeet models of transformers: the tokens and times of their `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.errors import raises

import partita
from partita.integrations.transformers import transducer

transformers = pytest.importorskip("transformers", exc_type=ImportError)
for name in ("ParakeetForRNNT", "ParakeetForTDT"):
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}", allow_module_level=True)

BLANK, FEATURES = 11, 16
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "subsampling_conv_channels": 8,
    "num_mel_bins": FEATURES,
}
NAMES = ["ParakeetForRNNT", "ParakeetForTDT"]


class Sample:
    """A model with random weights, a batch of features, and what its encoder makes of them."""

    def __init__(self, name: str, seed: int, blank_bias: float = 0.0) -> None:
        torch.manual_seed(seed)
        sizes = {"vocab_size": BLANK + 1, "blank_token_id": BLANK, "decoder_hidden_size": 16}
        kind = getattr(transformers, name.replace("For", "") + "Config")
        config = kind(encoder_config=ENCODER, max_symbols_per_step=4, **sizes)
        self.model = getattr(transformers, name)(config).eval()
        with (
            torch.no_grad()
        ):  # random weights as they are drawn would write one token again and again
            for module in (self.model.decoder, self.model.joint, self.model.encoder_projector):
                for weight in module.parameters():
                    weight.normal_()
            self.model.joint.head.bias[BLANK] += blank_bias
            # `generate` takes the greatest of all logits, those of durations too, as the token.
            self.model.joint.head.bias[BLANK + 1 :] -= 100.0
        self.model.generation_config.decoder_start_token_id = BLANK
        self.features = torch.randn(4, 200, FEATURES)
        self.mask = torch.ones(4, 200, dtype=torch.int64)
        for n, length in enumerate((200, 120, 64, 9)):
            self.mask[n, length:] = 0
        # With random weights all frames sound alike, so what is in common is taken away.
        projector, heard = self.model.encoder_projector, self.heard().pooler_output.flatten(0, 1)
        scale = 2 / heard.std(0)
        projector.weight.data *= scale[:, None]
        projector.bias.data = (projector.bias.data - heard.mean(0)) * scale
        heard = self.heard()
        self.encoder, self.lengths = heard.pooler_output, heard.attention_mask.sum(-1)

    @torch.no_grad()
    def heard(self) -> Any:
        """Return the output of the encoder."""
        return self.model.get_audio_features(self.features, self.mask, output_attention_mask=True)

    def search(self, function: Any, **options: Any) -> Any:
        predict, join, blank, durations = transducer(self.model)
        given = {"blank": blank, "durations": durations, "state_dims": 1, **options}
        return function(self.encoder, self.lengths, predict, join, **given)

    def generated(self, max_new_tokens: int) -> list[tuple[list[int], list[int]]]:
        """Return the tokens and their frames from `generate`, up to the end of each encoder."""
        options = {"attention_mask": self.mask, "max_new_tokens": max_new_tokens}
        found = self.model.generate(self.features, **options)
        result = []
        for n, length in enumerate(self.lengths.tolist()):
            tokens, frames, t = [], [], 0
            pairs = zip(found.sequences[n, 1:].tolist(), found.durations[n, 1:], strict=True)
            for token, duration in pairs:
                if token != BLANK and t < length:
                    tokens.append(token)
                    frames.append(t)
                t += int(duration)
            result.append((tokens, frames))
        return result


@pytest.mark.parametrize("name", NAMES)
def test_greedy_search_is_generate(name: str) -> None:
    total, S = 0, 120
    for seed in range(7):
        sample = Sample(name, seed, blank_bias=2.0)
        # A TDT without a limit of labels on a frame may write there without end, up to S here.
        limit = {"max_symbols_per_step": 4 if name == "ParakeetForRNNT" else S}
        found = sample.search(partita.rnnt_greedy_search, max_tokens=S, **limit)
        for n, (tokens, frames) in enumerate(sample.generated(2 * S)):
            length = int(found.lengths[n, 0])
            assert found.tokens[n, 0, :length].tolist() == tokens[:S]
            assert found.steps[n, 0, :length].tolist() == frames[:S]
            total += len(set(frames))
    assert total > 50


@pytest.mark.parametrize("name", NAMES)
def test_beam_boost_and_model(name: str) -> None:
    labels = [f"t{c}" for c in range(BLANK)] + ["<blank>"]
    sample = Sample(name, 1, blank_bias=4.0)
    options = {"beam_width": 4, "max_symbols_per_step": 4}
    plain = sample.search(partita.rnnt_beam_search, **options)
    assert (plain.scores > -torch.inf).any()
    (unused, *_) = (c for c in range(BLANK) if c not in plain.tokens[0])
    boost = partita.PhraseBoost([[labels[unused]]], labels, 30.0)
    found = sample.search(partita.rnnt_beam_search, boost=[boost, None, None, None], **options)
    assert unused in found.tokens[0]
    assert torch.equal(found.tokens[1:], plain.tokens[1:])


def test_other_models_are_refused() -> None:
    with raises("TypeError: model: expected a ParakeetForRNNT or ParakeetForTDT, got Linear"):
        transducer(torch.nn.Linear(2, 2))
