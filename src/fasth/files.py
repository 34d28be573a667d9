"""Files, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: str | Path, content: str | bytes) -> None:
    """Puts a file in place at once: whoever reads it, and whenever this is interrupted, finds the old or the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp lets nobody else read it
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
