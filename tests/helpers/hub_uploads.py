"""A stand-in for the Hub that takes uploads: repositories, branches, pull requests, large files by
their SHA-256, small ones in the commit.
"""

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.helpers.hub_server import HubServer, described

Files = dict[str, bytes]
SIGNATURE = "X-Amz-Signature=0123abcd"
"""In the addresses that large files are sent to, as good as a password."""


def blob_id(raw: bytes) -> str:
    return hashlib.sha1(f"blob {len(raw)}\0".encode() + raw).hexdigest()


@dataclass
class UploadHub(HubServer):
    """A context that keeps what it is sent.

    Args:
        failing: requests (method and part of the path) that fail, each once.
        slow: seconds until a large file is taken.
    """

    repos: dict[str, Any] = field(default_factory=dict)
    branches: dict[str, dict[str, Files]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    stored: Files = field(default_factory=dict)
    puts: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    commits: dict[str, tuple[str, str]] = field(default_factory=dict)
    failing: list[tuple[str, str]] = field(default_factory=list)
    slow: float = 0.0
    lock: Any = field(default_factory=threading.Lock)

    def add(self, repo: str, files: Files, *, private: bool = False) -> None:
        self.branches[repo], self.private[repo] = {"main": dict(files)}, private

    def _fails(self, request: BaseHTTPRequestHandler) -> bool:
        with self.lock:
            self.requests.append(f"{request.command} {unquote(request.path)}")
            self.tokens.add(request.headers.get("Authorization"))
            for each in self.failing:
                if request.command == each[0] and each[1] in request.path:
                    self.failing.remove(each)
                    return True
        return False

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        if self._fails(request):
            return self._send(request, 400, b"")
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        if match is None or match[1] not in self.branches:
            return self._refuse(request, 404, "RepoNotFound")
        repo, revision = match[1], match[2] or "main"
        branch = self.commits[revision][1] if revision in self.commits else revision
        if branch not in self.branches[repo]:
            return self._refuse(request, 404, "RevisionNotFound")
        siblings = [
            self._sibling(name, raw) for name, raw in sorted(self.branches[repo][branch].items())
        ]
        commit = self.commit(repo, branch)
        self.commits[commit] = (repo, branch)
        return self._json(request, described(repo, commit, siblings, private=self.private[repo]))

    def _sibling(self, name: str, raw: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"rfilename": name, "size": len(raw), "blobId": blob_id(raw)}
        if self._is_large(name):
            found["lfs"] = {
                "sha256": hashlib.sha256(raw).hexdigest(),
                "size": len(raw),
                "pointerSize": 130,
            }
        return found

    @staticmethod
    def _is_large(name: str) -> bool:
        return name.endswith((".safetensors", "tokenizer.json"))

    def receive(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        url = urlsplit(request.path)
        path = unquote(url.path)
        name = path.rsplit("/", 1)[-1]
        if request.command == "PUT":
            with self.lock:
                self.puts.append(name)
        if self._fails(request):
            return self._send(request, 400, b"")
        if request.command == "PUT":
            time.sleep(self.slow)
            assert hashlib.sha256(body).hexdigest() == name
            self.stored[name] = body
            return self._send(request, 200, b"")
        if path == "/api/validate-yaml":
            wrong = "license: nonsense" in json.loads(body)["content"]
            errors = [{"message": '"license" must be one of a list'}] if wrong else []
            return self._json(request, {"errors": errors, "warnings": []}, 400 if wrong else 200)
        if path == "/api/repos/create":
            return self._create(request, json.loads(body))
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            actions = [self._action(each) for each in json.loads(body)["objects"]]
            return self._json(request, {"transfer": "basic", "objects": actions})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path)
        assert match is not None, path
        repo, verb, branch = match.groups()
        if verb == "branch":
            if branch in self.branches[repo]:
                return self._json(request, {"error": "exists"}, 409)
            self.branches[repo][branch] = dict(self.branches[repo]["main"])
            return self._json(request, {})
        if verb == "preupload":
            there = self.branches[repo][branch]
            modes = [self._mode(each["path"], there) for each in json.loads(body)["files"]]
            return self._json(request, {"files": modes})
        return self._commit(
            request, repo, branch, body, pull_request="create_pr" in parse_qs(url.query)
        )

    def _create(self, request: BaseHTTPRequestHandler, wanted: dict[str, Any]) -> None:
        repo = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] == "forbidden":
            return self._send(request, 403, b"", {"X-Error-Message": "You don't have the rights"})
        if repo in self.branches:
            return self._json(request, {"error": "exists", "url": f"{self.url}/{repo}"}, 409)
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.add(repo, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
        return self._json(request, {"url": f"{self.url}/{repo}", "name": repo})

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        found = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.stored:
            return found
        return found | {
            "actions": {
                "upload": {"href": f"{self.url}/lfs/{wanted['oid']}?{SIGNATURE}", "header": {}}
            }
        }

    def _mode(self, path: str, there: Files) -> dict[str, Any]:
        mode = "lfs" if self._is_large(path) else "regular"
        found: dict[str, Any] = {"path": path, "uploadMode": mode, "shouldIgnore": False}
        if path in there:
            raw = there[path]
            found["oid"] = hashlib.sha256(raw).hexdigest() if self._is_large(path) else blob_id(raw)
        return found

    def _commit(
        self,
        request: BaseHTTPRequestHandler,
        repo: str,
        branch: str,
        body: bytes,
        *,
        pull_request: bool,
    ) -> None:
        files = dict(self.branches[repo][branch])
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            else:
                assert item["key"] == "header", item  # nothing is ever deleted
        target = "refs/pr/1" if pull_request else branch
        self.branches[repo][target] = files
        oid = self.commit(repo, target)
        self.commits[oid] = (repo, target)
        said = {"success": True, "commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}
        if pull_request:
            said["pullRequestUrl"] = f"{self.url}/{repo}/discussions/1"
        return self._json(request, said)
