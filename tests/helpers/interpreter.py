"""Triton's interpreter, without work that it repeats.

The interpreter replaces the functions of `triton.language` before a kernel runs, and again at each
call of a device function, which takes longer than most device functions. Here it does so once for
each module and launch.
"""

from typing import Any

from triton.runtime import interpreter


def patch_language_once_per_launch() -> None:
    """Let calls of device functions find the language as the launch has left it."""
    patch_language = interpreter._patch_lang
    patched: set[str] = set()  # the modules whose functions have been called in this launch

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """The replacements of one launch, whose end makes the set empty."""

        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module in patched:
            return interpreter._LangPatchScope()
        is_launch = not patched
        patched.add(module)
        found = patch_language(function)
        if is_launch:
            scope = Scope()
            scope._changes = found._changes
            return scope
        return found

    interpreter._patch_lang = patch_once
