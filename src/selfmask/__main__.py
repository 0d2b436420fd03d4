"""`python -m selfmask`, which is what torchrun starts."""

from .cli import app

app()
