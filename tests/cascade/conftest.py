"""Settings for all tests of cascades."""

from collections.abc import Iterator

import pytest

from selfmask.commands.cascade import outcome


@pytest.fixture(autouse=True, scope="session")
def _small_maps() -> Iterator[None]:
    """Few points on the maps of reports: they would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcome, "_POINTS", 40)
        yield
