"""A small HTTP server that answers `datasets.load_dataset("owner/name")` as the Hugging Face Hub does, for one dataset.

It knows the four requests that a data set of files at the top of its repository needs: the repository's description, its
list of files, and HEAD and GET of a file. Anything else is "not found".
"""

import contextlib
import hashlib
import http.server
import json
import threading
from pathlib import Path


@contextlib.contextmanager
def hub_stand_in(name: str, folder: Path):
    """Serves the files of `folder` as the dataset `name`; gives the address for HF_ENDPOINT and the paths asked for."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    listing = [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for path, data in files.items()
    ]
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            requests.append(path)
            file = files.get(path.rsplit("/", 1)[-1]) if path.startswith(f"/datasets/{name}/resolve/") else None
            if path.startswith(f"/api/datasets/{name}/tree/"):
                self.reply(200, json.dumps(listing).encode())
            elif path == f"/api/datasets/{name}" or path.startswith(f"/api/datasets/{name}/revision/"):
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
