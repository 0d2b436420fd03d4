"""`python -m benchmarks.s3`: tars in a bucket of moto, on this machine, and what embed and adapt make of trouble.

moto (a server that speaks S3) does not go with the versions in constraints.txt, so it lives in an environment of its
own, which is made and removed here. Between it and us stands a relay that can break off. Ends with an error if anything
is not as it should be.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .streams import write_tiny

IMAGES = 6_000  # in twelve tars
MOTO = ("moto[server]>=5", "boto3")
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
WHERE = "s3://photos/{00000..00011}.tar"
UPLOAD = """
import pathlib, sys, boto3
s3 = boto3.client("s3", endpoint_url=sys.argv[1])
s3.create_bucket(Bucket="photos")
for file in sorted(pathlib.Path(sys.argv[2]).iterdir()):
    s3.upload_file(str(file), "photos", file.name)
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny(folder / "tiny", IMAGES)
        with served(folder) as moto, Relay(moto) as relay:
            run(folder, moto, relay)
    print("all as it should be")
    return 0


def run(folder: Path, moto: int, relay: Relay) -> None:
    environment = os.environ | KEYS | {"AWS_ENDPOINT_URL": relay.url, "AWS_EC2_METADATA_DISABLED": "true"}

    def selfmask(*words: object, cache: str) -> subprocess.CompletedProcess[str]:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "selfmask", *map(str, words)],
            env=environment | {"SELFMASK_CACHE": str(folder / cache)},
            capture_output=True,
            text=True,
        )
        print(f"{time.monotonic() - began:5.1f} s, exit code {done.returncode}: {' '.join(map(str, words[:3]))}")
        return done

    def embedded(out: str, cache: str, where: str = WHERE) -> subprocess.CompletedProcess[str]:
        return selfmask("embed", "selfmask/tiny", where, "--out", folder / out, cache=cache)

    def same(one: str, other: str) -> None:
        assert (folder / one).read_bytes() == (folder / other).read_bytes(), f"{one} and {other} differ"
        print(f"        {one} = {other}, to the bit")

    print("from the disk, and from the bucket")
    assert embedded("disk.parquet", "a", str(folder / "tiny/tars")).returncode == 0
    assert embedded("bucket.parquet", "b").returncode == 0
    same("bucket.parquet", "disk.parquet")
    learn = ("--backbone", "selfmask/tiny", "--steps", "4", "--batch-size", "32", "--no-gate", "--out")
    for out, where in (("disk", str(folder / "tiny/tars")), ("bucket", WHERE)):
        done = selfmask("adapt", where, *learn, folder / out, cache="c")
        assert done.returncode == 0, done.stderr
    same("bucket/mask.smn", "disk/mask.smn")

    print("every answer breaks off half-way, three times")
    relay.cut = 3
    assert embedded("cut.parquet", "d").returncode == 0
    assert relay.cut == 0
    same("cut.parquet", "disk.parquet")

    print("every answer breaks off half-way, for ever")
    relay.cut = 10**9
    refused(embedded("never.parquet", "e"), "s3://photos/0000")
    relay.cut = 0

    print("the server goes away in the middle of the work, and comes back")
    relay.most = relay.passed + (5 << 20)
    refused(embedded("gone.parquet", "b"), "s3://photos/000")  # what "b" knows is where the images are
    relay.most = None
    back = embedded("gone.parquet", "b")
    assert (back.returncode, "images were embedded already" in back.stdout) == (0, True), back.stdout
    print("        " + back.stdout.strip().replace("\n", "\n        "))
    same("gone.parquet", "disk.parquet")

    print("a tar that is not there, and keys that nobody knows (403)")
    missing = embedded("missing.parquet", "g", "s3://photos/{00011..00012}.tar")
    assert (missing.returncode, "there is no s3://photos/00012.tar" in missing.stderr) == (2, True), missing.stderr
    ask(f"http://127.0.0.1:{moto}/moto-api/reset-auth", b"0")
    refused(embedded("keys.parquet", "h"), "s3://photos/0000", "ACCESS_DENIED")


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    print("        " + done.stderr.strip().replace("\n", "\n        "))


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of a moto that has the tars."""
    own = folder / "moto"
    venv.create(own, with_pip=True)
    subprocess.run([own / "bin/pip", "install", "-q", "--disable-pip-version-check", *MOTO], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "moto.log").open("wb")
    server = subprocess.Popen([own / "bin/moto_server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while True:
            with suppress(OSError):
                ask(f"http://127.0.0.1:{port}/moto-api/data.json")
                break
            assert time.monotonic() < until, "moto does not start"
            time.sleep(0.2)
        version = subprocess.run([own / "bin/pip", "freeze"], capture_output=True, text=True, check=True).stdout
        print(
            ", ".join(line for line in version.splitlines() if line.startswith(("moto=", "boto3=", "python-dateutil=")))
        )
        address = f"http://127.0.0.1:{port}"
        subprocess.run(
            [own / "bin/python", "-c", UPLOAD, address, folder / "tiny/tars"], check=True, env=os.environ | KEYS
        )
        yield port
    finally:
        server.terminate()
        server.wait()
        log.close()


def ask(url: str, data: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, data, {"Content-Type": "text/plain"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: bytes = answer.read()
    return found


class Relay:
    """Passes everything on to a port, as far as it is allowed to.

    cut: so many of the next answers of a tar's bytes end in the middle. most: bytes passed in all; then nobody answers.
    """

    def __init__(self, port: int) -> None:
        self.port, self.cut, self.most, self.passed = port, 0, None, 0  # type: int, int, int | None, int
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._lock = threading.Lock()

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                there, _ = self._socket.accept()
                here = socket.create_connection(("127.0.0.1", self.port))
                threading.Thread(target=self._pass, args=(there, here, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(here, there, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        since = 0  # bytes of this answer
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers:
                    since = len(data) if data.startswith(b"HTTP/") else since + len(data)
                    if self._breaks(since, len(data)):
                        break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _breaks(self, since: int, size: int) -> bool:
        with self._lock:
            self.passed += size
            if self.most is not None and self.passed > self.most:
                return True
            if self.cut and since > 100_000:  # in the middle of a tar, not of what is said about it
                self.cut -= 1
                return True
        return False


if __name__ == "__main__":
    sys.exit(main())
