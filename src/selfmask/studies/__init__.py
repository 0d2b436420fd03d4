"""The paper's tables and figures, each a study of its own that one command repeats."""
