"""An object store that gives one answer to every request, in its own process: delta-rs may keep Python's lock.

python refusing_store.py STATUS BODY    prints its port, and serves until it is killed
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def refusing(status: int, body: str) -> Iterator[str]:
    """The address of a store that answers everything with this."""
    command = [sys.executable, __file__, str(status), body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


class _Answer(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        body = sys.argv[2].encode()
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(int(sys.argv[1]))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = _answer  # noqa: N815 - the names that the base class looks for

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    print(server.server_port, flush=True)
    server.serve_forever()
