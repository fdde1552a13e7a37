"""Locks on local files (flock) among processes and threads; a process that is killed leaves none.

A lock belongs to an open file, which a fork shares with the child. An exclusive one belongs to a thread at
work, which the child does not have, so the child closes it at once.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

_opening = threading.Lock()
_exclusive: set[int] = set()


def lock_exclusive(path: Path, *, wait: bool, make: bool = True) -> int | None:
    """A descriptor of the file, locked by nobody else; None when somebody has and `wait` is not set.

    Args:
        make: whether to make the file if it is not there.

    Raises:
        FileNotFoundError: it is not there, or its folder is not.
    """
    with _opening:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
        _exclusive.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        unlock(descriptor)
        return None
    except BaseException:
        unlock(descriptor)
        raise
    return descriptor


def lock_shared(path: Path) -> int | None:
    """A descriptor of the file, once nobody has locked it exclusively; None when it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if has_name(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def share(descriptor: int) -> None:
    """Makes an exclusive lock a shared one. Between the two another may have it for a moment."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with _opening:
        _exclusive.discard(descriptor)


def unlock(descriptor: int) -> None:
    with _opening:
        _exclusive.discard(descriptor)
        os.close(descriptor)


def has_name(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of that name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    for descriptor in _exclusive:
        os.close(descriptor)
    _exclusive.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_in_child)
