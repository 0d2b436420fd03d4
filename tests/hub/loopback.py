"""A hub on this machine: what `huggingface_hub` asks of the real one, in a few lines, over real HTTP.

Repositories hold commits, commits hold files. It can be told to fail: `failing["commit"] = "drop"` closes the
connection when a commit comes, a number is a status to answer with, "half" breaks off in the middle of a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN, READER = "hf_writer", "hf_reader"
LICENCES = {"apache-2.0", "cc-by-4.0", "cc0-1.0", "mit", "other"}


class Repo:
    """Commits from the first to the last, and names of some."""

    def __init__(self, private: bool) -> None:
        self.private, self.commits, self.branches = private, list[tuple[str, dict[str, bytes]]](), dict[str, str]()

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        before = dict(self.commits[-1][1]) if self.commits else {}
        oid = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits.append((oid, before | files))
        self.branches[branch] = oid
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        oid = self.branches.get(revision, revision)
        return next(((each, files) for each, files in self.commits if each == oid), None)


class Hub:
    def __init__(self) -> None:
        self.repos = dict[str, Repo]()
        self.failing = dict[str, int | str]()
        self.seen = list[str]()
        """What was asked for, in order: kinds of requests."""
        self.claimed = dict[str, int]()
        """Sizes that are told in place of the true ones, by name of the file."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    port = 0


KINDS = {
    "whoami": r"/api/whoami-v2",
    "create": r"/api/repos/create",
    "validate": r"/api/validate-yaml",
    "preupload": r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>.+)",
    "commit": r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>.+)",
    "info": r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?",
    "resolve": r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)",
}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        matches = ((kind, re.fullmatch(form, path)) for kind, form in KINDS.items())
        kind, found = next(((kind, match) for kind, match in matches if match), ("", None))
        if found is None:
            return self._answer(404, {"error": f"no such page: {path}"})
        name = f"head-{kind}" if self.command == "HEAD" else kind
        self.hub.seen.append(name)
        if (failure := self.hub.failing.get(name)) == "drop":
            self.close_connection = True
            return None
        if isinstance(failure, int):
            return self._answer(failure, {"error": f"told to answer {failure}"})
        words = found.groupdict()
        repo = self.hub.repos.get(words.get("repo") or "")
        if "repo" in words and (repo is None or (repo.private and self._who() is None)):
            return self._answer(401 if self._who() is None else 404, {"error": "no such repository"}, "RepoNotFound")
        return getattr(self, f"_{kind}")(body, repo, words)

    do_GET = do_POST = do_HEAD = _any  # noqa: N815

    def _who(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return {TOKEN: "write", READER: "read"}.get(token)

    def _whoami(self, *_: Any) -> None:
        if (role := self._who()) is None:
            return self._answer(401, {"error": "Invalid username or password."})
        who = {"type": "user", "name": "me", "orgs": [{"name": "club"}], "auth": {"accessToken": {"role": role}}}
        return self._answer(200, who)

    def _create(self, body: bytes, *_: Any) -> None:
        words = json.loads(body)
        if self._who() != "write":
            return self._answer(403, {"error": "you may not write"})
        name = f"{words.get('organization') or 'me'}/{words['name']}"
        if name in self.hub.repos:
            return self._answer(409, {"error": "it exists", "url": f"{self.hub.url}/{name}"})
        private = words.get("private") or words.get("visibility") == "private"
        self.hub.repos[name] = Repo(bool(private))
        return self._answer(200, {"url": f"{self.hub.url}/{name}"})

    def _validate(self, body: bytes, *_: Any) -> None:
        content = json.loads(body)["content"]
        found = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
        words = yaml.safe_load(found[1]) if found else {}
        errors = []
        if words.get("license") not in (None, *LICENCES):
            errors.append({"message": f'"license" must be one of {sorted(LICENCES)}'})
        if not isinstance(words.get("tags"), list) or not re.fullmatch(r"[\w./-]+", words.get("base_model", "x")):
            errors.append({"message": "tags or base_model are not of their form"})
        return self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _preupload(self, body: bytes, *_: Any) -> None:
        files = [
            {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(body)["files"]
        ]
        return self._answer(200, {"files": files})

    def _commit(self, body: bytes, repo: Repo, words: dict[str, str]) -> None:
        if self._who() != "write":
            return self._answer(403, {"error": "you may not write"})
        files = {}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        oid = repo.commit(files, words["revision"])
        return self._answer(200, {"commitUrl": f"{self.hub.url}/{words['repo']}/commit/{oid}", "commitOid": oid})

    def _info(self, body: bytes, repo: Repo, words: dict[str, str]) -> None:
        if (found := repo.at(words["revision"] or "main")) is None:
            return self._answer(404, {"error": "no such revision"}, "RevisionNotFound")
        oid, files = found
        siblings = [
            {"rfilename": name, "size": self.hub.claimed.get(name, len(content)), "blobId": name}
            for name, content in files.items()
        ]
        return self._answer(200, {"id": words["repo"], "sha": oid, "private": repo.private, "siblings": siblings})

    def _resolve(self, body: bytes, repo: Repo, words: dict[str, str]) -> None:
        if (found := repo.at(words["revision"])) is None:
            return self._answer(404, {"error": "no such revision"}, "RevisionNotFound")
        oid, files = found
        if (content := files.get(words["file"])) is None:
            return self._answer(404, {"error": "no such file"}, "EntryNotFound", commit=oid)
        return self._send(200, content, {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def _answer(self, status: int, words: Any, code: str | None = None, commit: str | None = None) -> None:
        headers = {"Content-Type": "application/json"}
        if code is not None:
            headers |= {"X-Error-Code": code, "X-Error-Message": words["error"]}
        if commit is not None:
            headers["X-Repo-Commit"] = commit
        self._send(status, json.dumps(words).encode(), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        name = urlsplit(self.path).path.rpartition("/")[2]
        size = self.hub.claimed.get(name, len(content)) if self.command == "HEAD" else len(content)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.failing.get("resolve") == "half" and "/resolve/" in self.path:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content)


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
