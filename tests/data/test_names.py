"""Names in little memory, in the order that lists of them had."""

import json
import pickle
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfmask.data import names as module
from selfmask.data import open_images
from selfmask.data.names import Names, SortedPaths, names_hash

PARTS = st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=4)


@given(st.lists(st.lists(PARTS, min_size=1, max_size=3).map(tuple), max_size=30))
def test_paths_come_sorted_by_their_parts(paths: list[tuple[str, ...]]) -> None:
    found = SortedPaths()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", 4)
        for path in paths:
            found.add(path)
        names = found.names()
    expected = ["/".join(path) for path in sorted(paths)]
    files = names.below("root")
    assert [files[i] for i in range(len(files))] == [f"root/{each}" for each in expected]
    assert [names.top(i) for i in range(len(names))] == [path[0] for path in sorted(paths)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=20))
def test_they_are_like_a_list(texts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", 3)
        names = Names(text.encode() for text in texts)
        assert names == texts
        assert texts == names
        assert list(names) == names[:] == texts
        assert [names[-1 - i] for i in range(len(texts))] == texts[::-1]
        assert pickle.loads(pickle.dumps(names)) == names
        assert names != [*texts, "more"]
        assert names_hash(names) == names_hash(texts) == sha256(json.dumps(texts).encode()).hexdigest()
    with pytest.raises(IndexError):
        names[len(texts)]


def test_names_that_are_no_text_lead_to_their_files(tmp_path: Path) -> None:
    from .shards import png

    odd = tmp_path / "photos" / b"odd-\xff.png".decode("utf-8", "surrogateescape")
    odd.parent.mkdir()
    odd.write_bytes(png(0))
    images = open_images(tmp_path / "photos")
    assert images.names == ["odd-\\xff.png"]
    assert images[0].shape == (3, 24, 24)
