"""`python -m eagle_cli` is `eagle`."""

import os
import sys
from typing import NoReturn

from eagle_cli.main import main


def run() -> NoReturn:
    """The process that is `eagle`."""
    leave(main())


def leave(code: int) -> NoReturn:
    """Ends this process; if torchrun started it, without taking Python down first.

    A sharded head leaves gloo's threads running, with tensors in them, behind its destroyed process group.
    One that frees a tensor while Python goes away aborts the process: a finished training would have failed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
