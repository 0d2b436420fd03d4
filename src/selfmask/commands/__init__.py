"""One verb a file: its settings, what it does, and what comes out."""
