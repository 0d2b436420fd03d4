"""How much disk an install takes beyond torch: the packages that selfmask needs, and those that they need.

    python -m tools.base_size [EXTRA ...]

Counts the files that each package lists as its own, as installed here, without what torch needs anyway (numpy is not
among that) and without what Python compiles later.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

_BEYOND = "torch"


def needed(name: str, extras: set[str], found: dict[str, Distribution]) -> None:
    """Add the package and all that it needs on this machine to `found`."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return
    try:
        found[key] = distribution(name)
    except PackageNotFoundError:
        print(f"not installed: {name}", file=sys.stderr)
        return
    for text in found[key].requires or ():
        requirement = Requirement(text)
        asked = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in asked):
            needed(requirement.name, requirement.extras, found)


def size(package: Distribution) -> int:
    """Bytes of the files that it brought."""
    paths = (Path(str(package.locate_file(file))) for file in package.files or () if file.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    everything, without = dict[str, Distribution](), dict[str, Distribution]()
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] + [
        text for extra in sys.argv[1:] for text in project["optional-dependencies"][extra]
    ]
    for requirement in map(Requirement, texts):
        needed(requirement.name, requirement.extras, everything)
    needed(_BEYOND, set(), without)
    sizes = {name: size(each) for name, each in everything.items() if name not in without}
    for name, bytes_ in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{bytes_ / 1e6:8.1f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:8.1f} MB  {len(sizes)} packages beyond torch and what torch needs")


if __name__ == "__main__":
    main()
