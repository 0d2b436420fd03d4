"""Side-by-side measurements: each prints ratios against what a user would do otherwise."""
