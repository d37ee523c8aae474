"""A small HTTP server that answers `load_dataset("owner/name")` and `from_pretrained("owner/name")` as the Hub does.

It knows the four requests that a repository needs: its description, its list of files, and HEAD and GET of a file. Anything
else is "not found". `hub_for_pushes` takes uploads.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from pathlib import Path


@contextlib.contextmanager
def hub_stand_in(name: str, folder: Path, kind: str = "datasets", fault: str | None = None):
    """Serves the files of `folder` as `name`, one of the "datasets" or "models"; gives the address for HF_ENDPOINT and the
    paths asked for.

    `fault`: "private" (401 for all, as for whoever is not logged in), "gated" (the description is public, its files are not).
    """
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    listing = [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for path, data in files.items()
    ]
    folders = {str(parent) for path in files for parent in Path(path).parents} - {"."}
    listing += [
        {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()} for path in folders
    ]
    requests = []
    files_at = f"/datasets/{name}/resolve/" if kind == "datasets" else f"/{name}/resolve/"
    api = f"/api/{kind}/{name}"

    class Handler(Answers):
        def do_GET(self):  # and HEAD
            path = self.path.split("?")[0]
            requests.append(path)
            if fault == "private":
                return self.reply(401, b"Invalid username or password.", {"X-Error-Code": "RepoNotFound"})
            if fault == "gated" and path.startswith(files_at):
                about = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {kind[:-1]} {name} is restricted."}
                return self.reply(401, b"", about)
            # After the address comes the revision, which may be written as refs%2Fconvert.
            file = files.get(path[len(files_at) :].partition("/")[2]) if path.startswith(files_at) else None
            if path.startswith(f"{api}/tree/"):
                below = path.removeprefix(f"{api}/tree/").partition("/")[2]
                inside = [entry for entry in listing if Path(below) in Path(entry["path"]).parents]
                if "recursive=True" not in self.path:
                    inside = [entry for entry in inside if Path(entry["path"]).parent == Path(below)]
                self.reply(200, json.dumps(inside).encode())
            elif path == api or path.startswith(f"{api}/revision/"):
                siblings = [{"rfilename": path} for path in files]
                self.reply(200, json.dumps({"id": name, "sha": commit, "siblings": siblings, "tags": []}).encode())
            elif file is not None:
                headers = {"ETag": f'"{hashlib.sha1(file).hexdigest()}"'}
                first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
                if first:  # of a part: the list of names at the end of a zip
                    self.reply(206, file[int(first) : int(last or len(file)) + 1], headers)
                else:
                    self.reply(200, file, headers)
            else:
                known = f"/{name}/" in f"{path}/"
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})

        do_HEAD = do_GET

        def reply(self, status, body, headers=None):
            super().reply(status, body, {"X-Repo-Commit": commit, **(headers or {})})

    with serving(Handler) as address:
        yield address, requests


class Answers(http.server.BaseHTTPRequestHandler):
    def reply(self, status, body, headers=None, sent=None):
        """`sent`: bytes of the body that arrive (all)."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


TOKENS = {"hf_write": "write", "hf_read": "read", "hf_fine": "fineGrained"}  # of the user `me`; hf_fine may write to me/open


@contextlib.contextmanager
def hub_for_pushes(existing: tuple[str, ...] = ()):
    """Takes the pushes of the user `me`, who may write to me/..., and refuses others as the Hub does.

    Gives its address and what it was given: repository -> file -> bytes, with "" -> the JSON it was created with.
    """
    repositories = {name: {} for name in existing}

    class Handler(Answers):
        def do_GET(self):
            role, path = self.role(), self.path.split("?")[0]
            if path == "/api/whoami-v2":
                if role is None:
                    return self.reply(401, {"error": "Invalid username or password."})
                return self.reply(200, {"name": "me", "auth": {"accessToken": {"displayName": "mine", "role": role}}})
            name = "/".join(path.split("/")[3:5])
            if name in repositories:
                return self.reply(200, {"id": name, "sha": "0" * 40, "siblings": [], "tags": []})
            return self.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/api/repos/create":
                asked = json.loads(content)
                name = f"{asked['organization'] or 'me'}/{asked['name']}"
                if not self.may_write(name):
                    return self.refuse(
                        f"You don't have the rights to create a model under the namespace {name.split('/')[0]!r}"
                    )
                if name not in repositories:
                    repositories[name] = {"": asked}
                    return self.reply(200, {"url": f"http://{self.headers['Host']}/{name}"})
                return self.reply(
                    409, {"error": "You already created this model repo", "url": f"http://{self.headers['Host']}/{name}"}
                )
            if self.path == "/api/validate-yaml":  # of the model card
                return self.reply(200, {"errors": [], "warnings": []})
            name, request = "/".join(self.path.split("/")[3:5]), self.path.split("/")[5].split("?")[0]
            if not self.may_write(name):
                return self.refuse("You have read access but not the required permissions for this operation")
            if request == "preupload":
                files = [file["path"] for file in json.loads(content)["files"]]
                answer = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
                return self.reply(200, {"files": answer})
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.reply(200, {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/1", "commitOid": "1" * 40})

        def role(self):
            return TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

        def may_write(self, name):
            return name.startswith("me/") and (self.role() == "write" or (self.role() == "fineGrained" and name == "me/open"))

        def refuse(self, why):
            self.reply(403, {"error": why}, {"X-Error-Message": why})

    with serving(Handler) as address:
        yield address, repositories
