"""The options with which Triton compiles every kernel of the package."""

from __future__ import annotations

from typing import Any

from . import launcher


def compiler_options() -> dict[str, Any]:
    """Return the options of Triton's compiler that all kernels share.

    Products are fused with sums, for speed and accuracy; Triton 3.10 will not do so by default.

    In its debug mode Triton checks sums, differences and products of 32-bit integers for overflow.
    In other modes it would translate these checks too, and drop them later. Leaving them out does
    not change the machine code, and saves a seventh of the translation from Python.
    """
    import triton

    if not launcher.is_known_triton():
        return {}
    checks = {} if triton.knobs.runtime.debug else {"sanitize_overflow": False}
    return {"enable_fp_fusion": True, **checks}
