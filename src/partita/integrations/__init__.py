"""Drop-in modules with the names of other projects. Each module is imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["fast_ctc_decode", "koi", "pyctcdecode", "torchaudio", "transformers", "trl", "verl"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
