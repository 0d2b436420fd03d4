"""Cascades: a dispatcher's mask, a router, an expert's mask for each cluster, and what makes one vector of theirs."""
