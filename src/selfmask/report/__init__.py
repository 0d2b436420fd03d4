"""Reports: HTML pages that open from disk, with no network. They take plain data, and know nothing of models."""
