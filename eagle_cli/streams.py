"""stdin, stdout and stderr where a job's surroundings have closed or filled them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def open_closed_streams() -> None:
    """Opens those that are closed on nothing, so that no file of ours takes their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def drop_stdout() -> None:
    """Lets what is still to be written to stdout go nowhere, instead of failing once more at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    with suppress(OSError):
        sys.stdout.flush()
