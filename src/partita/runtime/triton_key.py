"""The key of Triton's installation, stored between processes.

Every entry of Triton's cache is named after a hash of Triton's own files, of which one has hundreds
of megabytes. Triton computes it again in each process, which takes longer than the rest of a first
call whose kernels are cached. Here the hash is stored beside the sizes and times of these files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

FILE = "partita_triton_key.txt"
is_new = threading.Event()  # set before a key is computed that was not stored


def use_stored() -> None:
    """Let Triton use the stored hash of its files; compute and store it where there is none.

    Nothing happens with a version of Triton that computes its key in another way.
    """
    from triton.runtime import cache

    compute = getattr(cache, "triton_key", None)
    if compute is None or not hasattr(compute, "cache_info") or compute.cache_info().currsize:
        return  # another way, or computed or replaced before
    try:
        stamp = _stamp(Path(cache.__file__).parents[1])
        manager = cache.get_cache_manager(stamp)
        path = manager.get_file(FILE)
        if path is None:
            is_new.set()
            manager.put(compute(), FILE, binary=False)
            return
        key = Path(path).read_text(encoding="utf-8")
    except OSError:
        return
    if key:
        cache.triton_key = lambda: key


def _stamp(folder: Path) -> str:
    """Return a hash of the names, sizes and times of the files of an installation."""
    found = hashlib.sha256()
    for file in _files(folder):
        status = file.stat()
        found.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Yield the modules of an installation in a fixed order, compiled ones too."""
    for path, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".so", ".pyd")):
                yield Path(path, name)
