"""A small HTTP server that answers `load_dataset("owner/name")` and `from_pretrained("owner/name")` as the Hub does.

It knows the four requests that a repository of files without folders needs: its description, its list of files, and HEAD and
GET of a file. Anything else is "not found".
"""

import contextlib
import hashlib
import http.server
import json
import threading
from pathlib import Path


@contextlib.contextmanager
def hub_stand_in(name: str, folder: Path, kind: str = "datasets"):
    """Serves the files of `folder` as `name`, one of the "datasets" or "models"; gives the address for HF_ENDPOINT and the
    paths asked for."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    listing = [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for path, data in files.items()
    ]
    requests = []
    files_at = f"/datasets/{name}/resolve/" if kind == "datasets" else f"/{name}/resolve/"
    api = f"/api/{kind}/{name}"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            requests.append(path)
            file = files.get(path.rsplit("/", 1)[-1]) if path.startswith(files_at) else None
            if path.startswith(f"{api}/tree/"):
                self.reply(200, json.dumps(listing).encode())
            elif path == api or path.startswith(f"{api}/revision/"):
                siblings = [{"rfilename": path} for path in files]
                self.reply(200, json.dumps({"id": name, "sha": commit, "siblings": siblings, "tags": []}).encode())
            elif file is not None:
                self.reply(200, file, {"ETag": f'"{hashlib.sha1(file).hexdigest()}"'})
            else:
                known = f"/{name}/" in f"{path}/"
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})

        do_HEAD = do_GET

        def reply(self, status, body, headers=None):
            self.send_response(status)
            for header, value in {"X-Repo-Commit": commit, **(headers or {})}.items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()
