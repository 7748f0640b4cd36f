"""Every sample of the catalogue, and random calls, against the reference in fp64 within bounds.

A default run draws a few hundred calls on the CPU, and one of each on a GPU. `PARTITA_DRAWS=10000`
sets the number of draws, which the calls share:

    PARTITA_DRAWS=10000 python -m pytest tests/catalogue/test_values.py -k "draws and cuda"
"""

import os
from dataclasses import replace

import pytest
import torch
from helpers.catalogue import BACKEND, all_samples, each_call
from helpers.rows import INTERPRETING, devices, dtypes
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import partita
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw

DRAWS = int(os.environ.get("PARTITA_DRAWS", "0"))
# Sizes that may be any number; others depend on each other, as k-mers do on bases.
FREE = ("rows", "classes", "hidden", "steps", "batch", "labels", "durations")


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
        samples += [call.sample(extreme, name=kind) for kind, extreme in call.extreme_draws(draw)]
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


@pytest.mark.interpreted
@devices
@each_call
def test_draws(name: str, device: str) -> None:
    call = CALLS[name]

    @settings(
        max_examples=DRAWS // len(CALLS) or (1 if INTERPRETING or device == "cuda" else 6),
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),  # shrinking takes minutes, and a drawn call is small
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        least = {size: int(size not in call.empty) for size in call.small if size in FREE}
        largest = 20 if INTERPRETING else 90
        sizes = {
            size: data.draw(st.integers(low, largest if size in ("rows", "classes") else 12), size)
            for size, low in least.items()
        }
        if "classes" in sizes:
            sizes["classes"] = max(sizes["classes"], call.small["classes"])
        # Of logits that are rounded, another may be the greatest.
        dtypes = st.sampled_from([d for d in call.dtypes if d.itemsize > 2 or not call.rounds])
        draw = Draw(
            data.draw(dtypes, "dtype"), device=device, seed=data.draw(st.integers(0, 2**16))
        )
        extremes = [changed for _, changed in call.extreme_draws(draw)]
        draw = data.draw(st.sampled_from([draw, *extremes]), "values and layout")
        draw = replace(draw, ragged=data.draw(st.booleans(), "ragged"))
        # The small budget is one for the small call.
        options = [option for option in call.options if option != "small budget"]
        option = data.draw(st.sampled_from(["", *options]), "option")
        if draw.values != "plain":
            option = ""
        with partita.backend(BACKEND), poisoned_memory():
            errors = call.sample(draw, option, sizes).errors()
        assert not {part: error for part, error in errors.items() if error > 1}

    run()
