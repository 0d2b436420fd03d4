"""Processes of their own for tests that kill, interrupt or connect them, without seconds of imports for each."""

from __future__ import annotations

import multiprocessing

# One process imports what takes seconds, and forks another whenever a test asks: real ones, that share nothing else.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["pytest", "hypothesis", "torch", "timm", "selfmask.commands.cascade.run", "selfmask.cli"]
)
