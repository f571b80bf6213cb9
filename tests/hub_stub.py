"""A stub of the Hugging Face Hub: as much of its upload and download protocol as a model needs.

It is no Hub: it keeps repositories in memory, checks little, and knows one user, "me", with one
token. Requests are answered as the Hub answers them (git and LFS uploads, not Xet), and faults can
be put in their way.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_stub"
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class File:
    data: bytes
    is_lfs: bool

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def oid(self) -> str:
        return hashlib.sha256(self.data).hexdigest() if self.is_lfs else self.git_oid


@dataclass
class Repository:
    """Commits, each a mapping of paths to files, and the branches that name them."""

    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(
        self, branch: str, files: dict[str, File], message: str, oid: str | None = None
    ) -> str:
        oid = oid or hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        self.messages.append(message)
        return oid

    def files(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.branches.get(revision, revision)]

    def text(self, path: str, revision: str = "main") -> str:
        return self.files(revision)[path].data.decode()


@dataclass
class Fault:
    """Put in the way of the next requests of a method whose path holds `part`.

    status: of the answer; None breaks the connection off in the middle of the request.
    """

    method: str
    part: str
    status: int | None
    times: int = 1
    code: str | None = None
    after: bool = False  # the request is carried out, and only its answer lost


class HubStub:
    """The stub's state; `url` is its address while it is served."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def create(self, repo_id: str, files: dict[str, str | bytes], oid: str | None = None):
        """A repository with a first commit, which `oid` names."""
        repository = self.repositories[repo_id] = Repository(private=False)
        encoded = {k: v.encode() if isinstance(v, str) else v for k, v in files.items()}
        repository.commit("main", {k: File(v, is_lfs(k)) for k, v in encoded.items()}, "first", oid)
        return repository

    def count(self, method: str, part: str) -> int:
        """Requests so far of a method whose path holds `part`."""
        return sum(m == method and part in path for m, path in self.requests)


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


@contextmanager
def serving(hub: HubStub) -> Iterator[HubStub]:
    """Serve the stub on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def in_place_of_the_hub(folder, monkeypatch) -> Iterator[HubStub]:
    """Make huggingface_hub of this process talk to a stub, with an empty cache and no token."""
    from huggingface_hub import constants

    with serving(HubStub()) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield stub


def environment(stub: HubStub, cache, **more: str) -> dict[str, str]:
    """Variables that make a new process talk to the stub."""
    return {
        "HF_ENDPOINT": stub.url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
        **more,
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStub

    def log_message(self, *args):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:  # a client that has had enough
            self.close_connection = True

    def do_GET(self):
        self._dispatch()

    do_HEAD = do_POST = do_PUT = do_GET

    def _dispatch(self):
        self.hub.requests.append((self.command, self.path))
        split = urlsplit(self.path)
        self.route, self.query = unquote(split.path), parse_qs(split.query)
        fault = self._fault()
        if fault and fault.status is None and not fault.after:
            if self.command in ("POST", "PUT"):
                self.rfile.read(1)
            return self._break_off()
        self.body = self._read_body()
        if fault and not fault.after:
            return self._refuse(fault.status, fault.code)
        self.is_muted = bool(fault)
        for (method, pattern), answer in ROUTES.items():
            if method == self.command and (match := re.fullmatch(pattern, self.route)):
                return answer(self, **match.groupdict())
        return self._refuse(404)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _fault(self) -> Fault | None:
        for fault in self.hub.faults:
            if fault.times and fault.method == self.command and fault.part in self.path:
                fault.times -= 1
                return fault
        return None

    def _break_off(self):
        self.close_connection = True
        self.connection.close()

    def _answer(self, content=None, *, status=200, data=None, **headers: str):
        if self.is_muted:
            return self._break_off()
        data = json.dumps({} if content is None else content).encode() if data is None else data
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        return None

    def _refuse(self, status: int, code: str | None = None, message: str = "as the test wants"):
        self.is_muted = False
        headers = {"X_Error_Code": code} if code else {}
        self._answer({"error": message}, status=status, X_Error_Message=message, **headers)

    def _may_write(self, repo: str | None = None) -> bool:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, message="Invalid credentials in Authorization header")
        elif repo and not repo.startswith("me/") and "create_pr" not in self.query:
            self._refuse(403, message="not a repository of yours")
        else:
            return True
        return False

    def _repository(self, repo: str) -> Repository | None:
        repository = self.hub.repositories.get(repo)
        is_mine = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not is_mine):
            self._refuse(404 if is_mine else 401, "RepoNotFound", "Repository not found")
            return None
        return repository

    def _files(self, repo: str, revision: str) -> dict[str, File] | None:
        if (repository := self._repository(repo)) is None:
            return None
        try:
            return repository.files(revision)
        except KeyError:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None

    def create(self):
        asked = json.loads(self.body)
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not self._may_write(repo):
            return
        if repo in self.hub.repositories:
            self._answer({"url": f"{self.hub.url}/{repo}"}, status=409)
            return
        # By the version of huggingface_hub.
        repository = Repository(bool(asked.get("private")) or asked.get("visibility") == "private")
        repository.branches["main"] = hashlib.sha1(repo.encode()).hexdigest()
        repository.commits[repository.branches["main"]] = {}
        self.hub.repositories[repo] = repository
        self._answer({"url": f"{self.hub.url}/{repo}"})

    def info(self, repo: str, revision: str | None = None):
        if (files := self._files(repo, revision or "main")) is not None:
            repository = self.hub.repositories[repo]
            revision = revision or "main"
            siblings = [{"rfilename": path} for path in files]
            sha = repository.branches.get(revision, revision)
            content = {"id": repo, "sha": sha, "private": repository.private, "tags": []}
            self._answer({**content, "siblings": siblings})

    def tree(self, repo: str, revision: str):
        if (files := self._files(repo, revision)) is not None:
            entries = []
            for path, file in files.items():
                size = len(file.data)
                entry = {"type": "file", "path": path, "size": size, "oid": file.git_oid}
                if file.is_lfs:
                    entry["lfs"] = {"oid": file.oid, "size": size, "pointerSize": 134}
                entries.append(entry)
            self._answer(entries)

    def branch(self, repo: str, branch: str):
        if not self._may_write(repo) or (repository := self._repository(repo)) is None:
            return
        if branch in repository.branches:
            self._refuse(409, message="Reference already exists")
            return
        repository.branches[branch] = repository.branches["main"]
        self._answer()

    def preupload(self, repo: str, revision: str):
        if not self._may_write(repo) or (files := self._files(repo, revision)) is None:
            return
        answers = []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            mode = "lfs" if is_lfs(path) else "regular"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            answers.append({**answer, "oid": files[path].oid if path in files else None})
        self._answer({"files": answers})

    def validate_yaml(self):
        self._answer({"warnings": [], "errors": []})

    def batch(self, repo: str):
        if not self._may_write():
            return
        objects = []
        for asked in json.loads(self.body)["objects"]:
            if asked["oid"] not in self.hub.objects:
                url = f"{self.hub.url}/objects/{asked['oid']}"
                asked["actions"] = {"upload": {"href": url}}
            objects.append(asked)
        self._answer({"objects": objects, "transfer": "basic"})

    def store(self, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            self._refuse(400, message="this is not the object that was announced")
            return
        self.hub.objects[oid] = self.body
        self._answer()

    def commit(self, repo: str, revision: str):
        if not self._may_write(repo) or (repository := self._repository(repo)) is None:
            return
        files, message = dict(repository.files(revision)), ""
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                files[value["path"]] = File(self.hub.objects[value["oid"]], True)
        answer = {}
        if "create_pr" in self.query:
            revision = f"refs/pr/{len(repository.commits)}"
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/1"
        oid = repository.commit(revision, files, message)
        url = f"{self.hub.url}/{repo}/commit/{oid}"
        self._answer({"commitUrl": url, "commitOid": oid, **answer})

    def resolve(self, repo: str, revision: str, path: str):
        if (files := self._files(repo, revision)) is None:
            return
        if path not in files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        repository = self.hub.repositories[repo]
        commit = repository.branches.get(revision, revision)
        self._answer(data=files[path].data, ETag=f'"{files[path].oid}"', X_Repo_Commit=commit)


ROUTES = {
    ("POST", "/api/repos/create"): Handler.create,
    ("POST", "/api/validate-yaml"): Handler.validate_yaml,
    ("GET", f"/api/models/{REPO}"): Handler.info,
    ("GET", f"/api/models/{REPO}/revision/(?P<revision>.+)"): Handler.info,
    ("GET", f"/api/models/{REPO}/tree/(?P<revision>.+)"): Handler.tree,
    ("POST", f"/api/models/{REPO}/branch/(?P<branch>.+)"): Handler.branch,
    ("POST", f"/api/models/{REPO}/preupload/(?P<revision>.+)"): Handler.preupload,
    ("POST", f"/api/models/{REPO}/commit/(?P<revision>.+)"): Handler.commit,
    ("POST", f"/{REPO}\\.git/info/lfs/objects/batch"): Handler.batch,
    ("PUT", "/objects/(?P<oid>.+)"): Handler.store,
    ("GET", f"/{REPO}/resolve/(?P<revision>[^/]+|refs/pr/[0-9]+)/(?P<path>.+)"): Handler.resolve,
    ("HEAD", f"/{REPO}/resolve/(?P<revision>[^/]+|refs/pr/[0-9]+)/(?P<path>.+)"): Handler.resolve,
}
