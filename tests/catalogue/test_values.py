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
    # A GPU compiles a kernel for each option, layout and dtype.
    is_gpu = device == "cuda"
    samples = list(all_samples(name, draw))[: 1 if is_gpu and dtype != torch.bfloat16 else None]
    if not INTERPRETING and not (is_gpu and dtype != torch.float32):
        samples += call.extremes(draw)
    if not INTERPRETING:
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
