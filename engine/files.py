"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def check_output(path: Path) -> None:
    """ValueError unless `path` is, or can become, an ordinary file: devices and pipes are not."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not an ordinary file")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.resolve().parent}")


def write_whole(path: str | os.PathLike, write: Callable[[Path], None]) -> None:
    """Let `write` make a file beside `path`, then put it in its place, through links too.

    What stood there before stays until then. OSError, with the path, for what the system refuses.
    """
    target = Path(path).resolve()
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        check_output(target)
        write(part)
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    except (OSError, ValueError) as e:
        raise OSError(f"{path}: cannot be written: {getattr(e, 'strerror', None) or e}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
