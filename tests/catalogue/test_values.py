"""Every sample of the catalogue against the reference in fp64, within its bound."""

import pytest
import torch
from helpers.catalogue import BACKEND, all_samples, each_call
from helpers.rows import INTERPRETING, devices, dtypes

import partita
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw


@pytest.mark.interpreted
@devices
@dtypes
@each_call
def test_errors(name: str, dtype: torch.dtype, device: str) -> None:
    call = CALLS[name]
    if INTERPRETING and dtype != torch.float32:
        pytest.skip("the interpreter takes long, and rounds bf16 in its own way")
    draw = Draw(dtype, device=device)
    # Each option is another kernel to compile for a GPU, and fp16 shares its code with bf16.
    few = device == "cuda" and dtype in (torch.float16, torch.float64)
    samples = [call.sample(draw)] if few else list(all_samples(name, draw))
    if not INTERPRETING:
        samples += call.extremes(draw)
        pairs = [pair for pair in call.mixtures if pair[0] == dtype]
        samples += [call.sample(Draw(*pair, device=device), name=str(pair)) for pair in pairs]
    with partita.backend(BACKEND), poisoned_memory():
        errors = {str(sample): sample.errors() for sample in samples}
    beyond = {
        f"{sample}: {part}": error
        for sample, parts in errors.items()
        for part, error in parts.items()
        if error > 1
    }
    assert not beyond
