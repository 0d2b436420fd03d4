"""`python -m benchmarks.faults [--faults 200] [--seed 0]`: what goes wrong around a run, at a random moment of it.

Each fault hits one real run of `adapt`, `train`, `cascade` or `embed`. Afterwards its cause is removed and the run is
resumed. It must then end in the bytes of an undisturbed run. Errors on the way must be ours (with what to do next);
tracebacks, files half-written and processes left behind are counted.

Every run is a process, in a group of its own, forked from this one, which has imported everything: so moments fall into
the work and not into imports. The kinds of faults:

kill -9      of the main process; its helpers have to notice
SIGTERM      to the whole group, as schedulers do
Ctrl-C       SIGINT to the whole group, as terminals do
full disk    the run is on a disk in memory (tmpfs) that is filled up; without the right to mount one, a limit on the
             size of files
read-only    the folder, and all in it, loses its write permission (runs of root give up its capabilities first, so that
             permissions bind them, too)
no stderr    whoever reads the output goes away, or stderr is closed from the start; in half of the cases, SIGTERM later
clock back   the clock of Python is set back, by an hour to 56 years, and `kill -9` later in half of the cases
new image    one image is replaced by another of the same size and time, and `kill -9` later in most cases
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import dataclasses
import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

IMAGES, SIDE = 36, 32
DISK = 96 << 20  # bytes of the disk that is filled up
PATIENCE = 900.0  # seconds that a run may take; a few in fact, but not on a machine that does much else
BACK = (3600.0, 86400.0, 56 * 365.25 * 86400)  # seconds that the clock is set back by
KINDS = ("kill -9", "SIGTERM", "Ctrl-C", "full disk", "read-only", "no stderr", "clock back", "new image")
COLUMNS = ("tried", "stopped", "own errors", "equal", "lost", "tracebacks", "left behind")
LOADED = {
    "embed": ("cli.embed", "commands.opening", "embedding.features"),
    "adapt": ("cli.adapt", "cli.display", "commands.adapt", "report.page"),
    "train": ("cli.train", "cli.display", "commands.train", "report.page"),
    "cascade": ("cli.cascade", "cli.display", "commands.cascade.run", "commands.cascade.outcome", "report.cascade"),
}
TURNS = {"adapt": 2, "train": 2, "cascade": 1, "embed": 4}  # in a round: what takes long is tried less often
ALSO = ("matplotlib.figure", "torch.utils.tensorboard")
SMALL = ("--backbone", "selfmask/tiny", "--batch-size", "8", "--checkpoint-every", "3")
OFTEN = (*SMALL, "--steps", "12", "--log-every", "1", "--workers")
SHORT = (*SMALL, "--steps", "4", "--log-every", "1", "--experts", "2", "--components", "2", "--workers")


@dataclasses.dataclass(frozen=True)
class Verb:
    """One command: how it is called, and the file that must come out the same."""

    name: str
    words: tuple[str, ...]
    result: str
    resumes: bool = True

    def begin(self, photos: Path, spot: Path) -> list[str]:
        """The words of a new run."""
        what = ["selfmask/tiny"] if self.name == "embed" else []
        out = spot / self.result if self.name == "embed" else spot / "run"
        return [self.name, *what, str(photos), *self.words, "--out", str(out)]

    def go_on(self, photos: Path, spot: Path) -> list[str]:
        """The words that continue it; if it had not even said what it is, those of a new one."""
        begun = self.resumes and (spot / "run/config.json").exists()
        return [self.name, "--resume", str(spot / "run")] if begun else self.begin(photos, spot)

    def outcome(self, spot: Path) -> str | None:
        """What came out, in one hash; None if nothing did."""
        file = spot / self.result
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


VERBS = {
    "adapt": [
        Verb("adapt", (*OFTEN, "0", "--no-gate"), "run/mask.smn"),
        Verb("adapt", (*OFTEN, "2", "--no-gate"), "run/mask.smn"),
        Verb("adapt", (*OFTEN, "0", "--gate", "--quality-every", "3"), "run/mask.smn"),
    ],
    "train": [
        Verb("train", (*OFTEN, "0"), "run/mask.smn"),
        Verb("train", (*OFTEN, "2"), "run/mask.smn"),
    ],
    "cascade": [
        Verb("cascade", (*SHORT, "1", "--no-gate"), "run/cascade.smn"),
        Verb("cascade", (*SHORT, "1", "--no-gate"), "run/cascade.smn"),
        Verb("cascade", (*SHORT, "2", "--no-gate"), "run/cascade.smn"),
    ],
    "embed": [Verb("embed", ("--batch-size", "4"), "features.npz", resumes=False)],
}
"""Each command in some variants, which take turns: with helper processes, and without."""


class Child:
    """A run in a process, and a group, of its own; what it prints goes to a file, or to a pipe."""

    def __init__(self, words: list[str], printed: Path, prepare: Callable[[], None], pipe: bool = False) -> None:
        self.printed, self.begun = printed, time.monotonic()
        self.reading, writing = os.pipe() if pipe else (None, os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        self.pid = os.fork()
        if self.pid == 0:
            _run(words, writing, prepare)
        os.close(writing)
        self.code: int | None = None
        self.ended = self.begun

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code, self.ended = os.waitstatus_to_exitcode(status), time.monotonic()
        return self.code is not None

    def wait(self, until: float) -> bool:
        """Wait until so many seconds after its beginning; whether it has ended by then."""
        while not self.poll() and time.monotonic() - self.begun < until:
            time.sleep(0.002)
        return self.code is not None

    def end(self) -> int:
        """Wait for its end; its exit code. One that hangs is killed, and has no good code."""
        if not self.wait(PATIENCE):
            self.kill(signal.SIGKILL)
            self.wait(2 * PATIENCE)
            return 99
        assert self.code is not None
        return self.code

    def kill(self, number: int, group: bool = False) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def close_output(self) -> None:
        if self.reading is not None:
            os.close(self.reading)
            self.reading = None

    def helpers_left(self) -> bool:
        """Whether any process of the group is there a minute later: one that still imports notices only then."""
        for _ in range(600):
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                return False
            time.sleep(0.1)
        os.killpg(self.pid, signal.SIGKILL)
        return True


def _run(words: list[str], output: int, prepare: Callable[[], None]) -> None:
    """In the new process: the command, to its end."""
    code = 0
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            prepare()
        except KeyboardInterrupt:  # before the command has begun
            os._exit(130)
        sys.argv = ["selfmask", *words]
        import_module("selfmask.cli").main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        if sys.stderr is not None:
            traceback.print_exc()
        code = 98
    with suppress(BaseException):
        atexit._run_exitfuncs()
    os._exit(code)


# ---- the world that faults happen in --------------------------------------------------------------------------------


class World:
    """Pictures, and what undisturbed runs make of them."""

    def __init__(self, place: Path, chance: random.Random) -> None:
        self.place, self.chance = place, chance
        self.photos, self.printed = place / "photos", place / "printed"
        self._known: dict[tuple[object, ...], tuple[str, float]] = {}
        self._spots = 0
        import numpy
        from PIL import Image

        pixels = numpy.random.default_rng(0)
        for number in range(IMAGES):  # of three colours, and all of the same number of bytes
            image = pixels.integers(0, 120, (SIDE, SIDE, 3))
            image[..., number % 3] += 120
            file = self.photos / f"class{number % 3}" / f"{number:03d}.bmp"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.astype(numpy.uint8)).save(file)
        self.files = sorted(self.photos.rglob("*.bmp"))
        place.chmod(0o755)

    def spot(self) -> Path:
        """An empty place for one run, which whoever runs it may write to."""
        self._spots += 1
        spot = self.place / f"spot{self._spots}"
        spot.mkdir()
        return spot

    def whole(self, verb: Verb) -> tuple[str, float]:
        """What an undisturbed run makes of the pictures as they are now, and the seconds that it takes."""
        content = tuple(hashlib.sha256(file.read_bytes()).digest() for file in self.files)
        if (verb, content) not in self._known:
            spot = self.spot()
            child = Child(verb.begin(self.photos, spot), self.printed, self.prepared())
            code, seconds = child.end(), time.monotonic() - child.begun
            outcome = verb.outcome(spot)
            if code not in (0, 3) or outcome is None:
                raise SystemExit(f"an undisturbed run failed with code {code}:\n{self.printed.read_text()}")
            shutil.rmtree(spot)
            self._known[verb, content] = outcome, seconds
        return self._known[verb, content]

    def shorten(self, verb: Verb, child: Child) -> None:
        """Later moments are drawn from the life of the fastest run."""
        for key, (outcome, seconds) in self._known.items():
            if key[0] == verb:
                self._known[key] = outcome, min(seconds, child.ended - child.begun)

    def prepared(self, *more: Callable[[], None]) -> Callable[[], None]:
        """What a new process does first.

        Small parts of vectors; no drawing, which takes half of the time (pages are written without figures); its own
        place for temporary files; and no special rights.
        """

        def prepare() -> None:
            import_module("selfmask.embedding.features")._PART = 8
            import_module("matplotlib.figure").Figure.savefig = lambda _, file, **__: file.write("<svg></svg>")
            scratch = self.place / "scratch"
            scratch.mkdir(exist_ok=True)
            os.environ |= {"HOME": str(scratch), "TMPDIR": str(scratch), "MPLCONFIGDIR": str(scratch)}
            tempfile.tempdir = None
            for each in more:
                each()
            if os.getuid() == 0:
                _bind_root()

        return prepare


def _bind_root() -> None:
    """Give up the capabilities of root, for good and in all children: from now on, permissions count."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # of linux/capability.h
    if libc.prctl(28, 1, 0, 0, 0) or libc.capset(header, none):  # PR_SET_SECUREBITS, SECBIT_NOROOT
        raise OSError(ctypes.get_errno(), "cannot give up capabilities")


@contextmanager
def disk(spot: Path) -> Iterator[bool]:
    """A small disk at this place, if we may mount one; whether we may."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(spot)]
    mounted = subprocess.run(words, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(spot)], check=True)


def fill(spot: Path, left: int) -> Path:
    """Fill the disk, but for so many bytes."""
    ballast = spot / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(max(0, file.tell() - left))
    return ballast


def set_writable(spot: Path, writable: bool) -> None:
    """The folder, and all that is in it, while others may be writing."""
    if writable:
        spot.chmod(0o755)
    for folder, _, files in os.walk(spot, topdown=True):
        with suppress(FileNotFoundError):
            Path(folder).chmod(0o755 if writable else 0o555)
            for name in files:
                with suppress(FileNotFoundError):
                    (Path(folder) / name).chmod(0o644 if writable else 0o444)


def set_back(seconds: float, after: float) -> Callable[[], None]:
    """Sets the clock back, in a process, some time after its beginning."""

    def patch() -> None:
        begun, now, now_ns, local, universal = time.monotonic(), time.time, time.time_ns, time.localtime, time.gmtime

        def shift() -> float:
            return seconds if time.monotonic() - begun >= after else 0.0

        def shown(clock: Callable[[float], time.struct_time]) -> Callable[[float | None], time.struct_time]:
            return lambda moment=None: clock(time.time() if moment is None else moment)

        time.time = lambda: now() - shift()
        time.time_ns = lambda: now_ns() - int(shift() * 1e9)
        time.localtime, time.gmtime = shown(local), shown(universal)  # type: ignore[assignment]

    return patch


# ---- faults ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Told:
    """How one fault went."""

    stopped: bool = False
    own_errors: int = 0
    equal: bool = False
    tracebacks: int = 0
    left: list[str] = dataclasses.field(default_factory=list)
    printed: str = ""


class Fault:
    """One fault of one run, and what became of it."""

    def __init__(self, world: World, kind: str, verb: Verb) -> None:
        self.world, self.kind, self.verb, self.chance = world, kind, verb, world.chance
        self.told = Told()
        self.expected, self.life = world.whole(verb)
        self.spot = world.spot()
        self.later: Callable[[], None] | None = None  # what a resumed run's process does first

    def moment(self, least: float = 0.02, most: float = 1.0) -> float:
        return self.chance.uniform(least, most) * self.life

    def happen(self) -> Told:
        (self.spot / "notes.txt").write_text("mine")
        (self.spot / "run.tmp").write_text("mine")
        with {"full disk": self._full_disk, "new image": self._new_image}.get(self.kind, self._plain)():
            pass
        told = self.told
        told.left += [path.name for path in self.spot.rglob("*") if path.suffix in (".partial", ".tmp", ".part")]
        told.left = [name for name in told.left if name != "run.tmp"]
        if (self.spot / "notes.txt").read_text() + (self.spot / "run.tmp").read_text() != "minemine":
            told.left.append("a file of the user's was changed")
        shutil.rmtree(self.spot, ignore_errors=True)
        return told

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """A fault that needs nothing around it."""
        match self.kind:
            case "kill -9" | "SIGTERM" | "Ctrl-C":
                child = self._start()
                child.wait(self.moment())
                number = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM}.get(self.kind, signal.SIGINT)
                child.kill(number, group=self.kind != "kill -9")
            case "read-only":
                child = self._start()
                child.wait(self.moment())
                set_writable(self.spot, False)
                child.end()
                set_writable(self.spot, True)
            case "no stderr":
                if self.chance.random() < 0.3:
                    child = self._start(_without_stderr)
                else:
                    child = self._start(pipe=True)
                    child.wait(self.moment())
                    child.close_output()
                if self.chance.random() < 0.5:
                    child.wait(self.moment(0.3))
                    child.kill(signal.SIGTERM, group=True)
            case "clock back":
                back = self.chance.choice(BACK)
                child = self._start(set_back(back, self.moment()))
                self.later = set_back(back, 0.0)
                if self.chance.random() < 0.5:
                    child.wait(self.moment(0.3))
                    child.kill(signal.SIGKILL)
            case _:
                raise ValueError(self.kind)
        self._look(child)
        self._resume()
        yield

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        with disk(self.spot) as mounted:
            if mounted:
                (self.spot / "notes.txt").write_text("mine")
                (self.spot / "run.tmp").write_text("mine")
            child, left = self._start(pipe=not mounted), self.chance.choice((0, 100, 5_000, 50_000, 500_000))
            child.wait(self.moment())
            if mounted:
                ballast = fill(self.spot, left)
                child.end()
                ballast.unlink()
            else:
                with suppress(ProcessLookupError):
                    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (left, left))
                child.end()
            self._look(child)
            self._resume()
            yield
            self.told.left += [path.name for path in self.spot.rglob("*") if path.suffix in (".partial", ".part")]
            self.told.left += [path.name for path in self.spot.rglob("*.tmp") if path.name != "run.tmp"]

    @contextmanager
    def _new_image(self) -> Iterator[None]:
        file, other = self.chance.sample(self.world.files, 2)
        before, times = file.read_bytes(), file.stat()
        child = self._start()
        child.wait(self.moment(0.0, 0.8))
        new = file.with_suffix(".new")
        new.write_bytes(other.read_bytes())
        os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
        new.replace(file)
        try:
            if self.chance.random() < 0.7:
                child.wait(self.moment(0.5))
                child.kill(signal.SIGKILL)
            self._look(child)
            if self._try() in (0, 3):
                now = self.world.whole(self.verb)[0]  # of the pictures as they are
                self.told.equal = self.verb.outcome(self.spot) in (now, self.expected)
        finally:
            file.write_bytes(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if not self.told.equal:  # it was refused: with the old image, it has to go on
            self._resume()
        yield

    def _start(self, *prepare: Callable[[], None], pipe: bool = False) -> Child:
        self.world.printed.unlink(missing_ok=True)
        words = self.verb.begin(self.world.photos, self.spot)
        return Child(words, self.world.printed, self.world.prepared(*prepare), pipe)

    def _look(self, child: Child) -> None:
        """How a process has ended."""
        code = child.end()
        child.close_output()
        printed = self.world.printed.read_text(errors="replace") if self.world.printed.exists() else ""
        unclean = "Traceback" in printed or code not in (0, 2, 3, 130, -signal.SIGKILL, -signal.SIGTERM)
        if code == 1 and "Aborted" in printed:
            unclean = "Traceback" in printed
        if code in (0, 3) and not self.told.printed:  # it was not stopped: the machine is faster by now
            self.world.shorten(self.verb, child)
        self.told.stopped |= code not in (0, 3)
        self.told.own_errors += code == 2
        self.told.tracebacks += unclean
        self.told.printed += f"[{code}] {printed}"
        if code == -signal.SIGKILL and child.helpers_left():
            self.told.left.append("a process")

    def _try(self) -> int:
        """Resume once, waiting for helpers of the old process to notice that it is gone; the exit code."""
        for _ in range(40):
            self.world.printed.unlink(missing_ok=True)
            more = [] if self.later is None else [self.later]
            words = self.verb.go_on(self.world.photos, self.spot)
            child = Child(words, self.world.printed, self.world.prepared(*more))
            code = child.end()
            if "another run is writing" not in self.world.printed.read_text(errors="replace"):
                break
            time.sleep(0.25)
        self._look(child)
        return code

    def _resume(self) -> None:
        self.told.equal = self._try() in (0, 3) and self.verb.outcome(self.spot) == self.expected


def _without_stderr() -> None:
    os.close(2)
    sys.stderr = None  # as Python has it then


# ---- table ----------------------------------------------------------------------------------------------------------


def table(counts: dict[tuple[str, str], Counter[str]]) -> str:
    """Rows of faults and commands, and one of all."""
    rows = {f"{kind:<12}{verb:<9}": counts[kind, verb] for kind in KINDS for verb in VERBS if counts.get((kind, verb))}
    rows["all"] = sum(counts.values(), Counter())
    lines = [f"{'fault':<12}{'command':<9}" + "".join(f"{column:>13}" for column in COLUMNS)]
    for name, count in rows.items():
        lines.append(f"{name:<21}" + "".join(f"{count[column]:>13}" for column in COLUMNS))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults at random moments of real runs, which are then resumed.")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default=",".join(VERBS), help="only these, separated by commas")
    parser.add_argument("--json", action="store_true", help="print counts as JSON, for tests")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    verbs = [verb for verb in VERBS if verb in asked.commands.split(",")]
    for name in (*ALSO, *(f"selfmask.{module}" for verb in verbs for module in LOADED[verb])):
        import_module(name)
    begun, chance = time.monotonic(), random.Random(asked.seed)
    counts: dict[tuple[str, str], Counter[str]] = {(kind, verb): Counter() for kind in KINDS for verb in verbs}
    pairs = [pair for pair in counts for _ in range(TURNS[pair[1]])]
    place = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed at the end of every child
    try:
        world = World(place, chance)
        for number in range(asked.faults):
            turn, where = divmod(number, len(pairs))
            if where == 0:
                chance.shuffle(pairs)  # so that few faults are not all of one kind
            kind, name = pairs[where]
            variants = VERBS[name]
            told = Fault(world, kind, variants[turn % len(variants)]).happen()
            counts[kind, name] += Counter(
                {
                    "tried": 1,
                    "stopped": int(told.stopped),
                    "own errors": told.own_errors,
                    "equal": int(told.equal),
                    "lost": int(not told.equal),
                    "tracebacks": told.tracebacks,
                    "left behind": len(told.left),
                }
            )
            bad = told.tracebacks or told.left or not told.equal
            if bad:
                print(f"fault {number + 1}, {kind}, {name}: {told}", file=sys.stderr, flush=True)
            elif not asked.json:
                print(f"{number + 1} of {asked.faults}: {kind}, {name}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(place)
    total = sum(counts.values(), Counter())
    if asked.json:
        print(json.dumps(total))
    else:
        seconds = time.monotonic() - begun
        print(f"python -m benchmarks.faults --faults {asked.faults} --seed {asked.seed}    ({seconds / 60:.0f} min)\n")
        print(table(counts))
    return int(bool(total["lost"] or total["tracebacks"] or total["left behind"]))


if __name__ == "__main__":
    sys.exit(main())
