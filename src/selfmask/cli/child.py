"""`python -m selfmask.cli.child WORDS`: `selfmask WORDS`, which ends when the process that started it does.

It is started with a pipe for its input. Nobody writes to it; it is closed when the other side is gone, however that
came. Without this, a command whose engine was killed would go on, and be in the way of the one that takes its place.
"""

from __future__ import annotations

import os
import sys
import threading

from . import main


def _end_with_the_other_side() -> None:
    os.read(0, 1)
    os._exit(1)  # what is saved is whole at any moment


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_other_side, daemon=True).start()
    sys.argv[0] = "selfmask"
    main()
