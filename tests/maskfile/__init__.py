"""Tests of the mask file. `smn.py` is a second, independent reader to compare with."""
