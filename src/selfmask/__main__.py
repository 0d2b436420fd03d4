"""`python -m selfmask`, which is what torchrun starts."""

from .cli import main

if __name__ == "__main__":  # worker processes may import this module
    main()
