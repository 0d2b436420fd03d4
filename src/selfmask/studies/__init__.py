"""The paper's studies, and what it printed of them."""
