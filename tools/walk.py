"""The walk of `selfmask adapt`: the files of ours that a short run passes through, and the hops from one to another.

python tools/walk.py [--all]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from PIL import Image

import selfmask
from selfmask.cli import app
from selfmask.data import open_images

ROOT = Path(selfmask.__file__).parent
COURSE = ("cli/adapt.py", "commands/adapt.py", "training/run.py", "training/loop.py", "commands/outcome.py")


def own(frame: FrameType | None) -> str | None:
    """The file of ours that a frame, or whoever called it, is in; None while a file is imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(f"{ROOT}/"):
            imported = frame.f_code.co_name == "<module>"
            return None if imported else str(Path(frame.f_code.co_filename).relative_to(ROOT))
        frame = frame.f_back
    return None


def main() -> None:
    hops: dict[tuple[str, str], str] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            here, before = own(frame), own(frame.f_back)
            if here is not None and before is not None and here != before:
                hops.setdefault((before, here), frame.f_code.co_name)

    with tempfile.TemporaryDirectory() as place:
        clothes = open_images("selfmask/fashion")
        (photos := Path(place) / "photos").mkdir()
        for number in range(40):
            Image.fromarray(clothes[number].permute(1, 2, 0).numpy()).save(photos / f"{number}.png")
        options = f"--backbone selfmask/tiny --steps 2 --batch-size 8 --out {place}/run".split()
        asked, sys.argv = sys.argv, ["selfmask", "adapt", str(photos), *options]
        sys.setprofile(note)
        try:
            app()
        except SystemExit:
            pass
        finally:
            sys.setprofile(None)
    course = [hop for hop in hops if set(hop) <= set(COURSE)]
    if "--all" in asked:
        print("\n".join(f"{before} -> {here}  {name}" for (before, here), name in hops.items()))
    print(f"{len({file for hop in hops for file in hop})} files, {len(hops)} hops")
    print(f"of them the course: {len(COURSE)} files, {len(course)} hops")


if __name__ == "__main__":
    main()
