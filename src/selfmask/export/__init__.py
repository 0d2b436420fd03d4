"""Adapted networks for other programs: plain files, without anything of ours needed to run them."""
