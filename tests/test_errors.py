"""Errors say what was expected, what was found and what to do, and survive the way home from a worker."""

import pickle

import pytest

from selfmask import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and not issubclass(kind, Warning)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_text_and_pickle(kind: type[errors.SelfmaskError]) -> None:
    error = kind("it broke", expected=3, found=4, todo="count again")
    assert isinstance(error, errors.SelfmaskError)
    assert str(error).splitlines() == ["it broke", "  expected: 3", "  found:    4", "  do:       count again"]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.todo == "count again"
