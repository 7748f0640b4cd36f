"""One process compiles a function with Numba, and the others load its code from disk."""

import fcntl
import os
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any


def compile_once() -> None:
    """Make the processes of a test run take turns at the compilation of the same function.

    A process that waits finds the code in Numba's cache afterwards. Two that compile side by side
    would also overwrite each other's index of that cache.
    """
    try:
        from numba.core.compiler_lock import global_compiler_lock
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
    compile_one = Dispatcher.compile

    def compile_alone(self: Any, signature: Any) -> Any:
        name = f"{self.py_func.__code__.co_filename}:{self.py_func.__qualname__}"
        file = f"partita-tests-{os.getuid()}-{sha256(name.encode()).hexdigest()[:16]}"
        # Numba's own lock comes first, as two threads that took them crosswise would wait forever.
        with global_compiler_lock, open(Path(tempfile.gettempdir()) / file, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_one(self, signature)

    Dispatcher.compile = compile_alone
