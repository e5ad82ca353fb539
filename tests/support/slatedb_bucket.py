"""A small S3-compatible server on 127.0.0.1: objects of any number of buckets in memory, with what SlateDB asks of one.

Conditional writes, ranges and listings are those of S3; signatures are not looked at.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import threading
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tailrace.source.slatedb.object_store import ObjectStore


class Stored(NamedTuple):
    """An object, and when it was written: garbage collectors go by that."""

    body: bytes
    written: datetime.datetime

    @property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()}"'


class Buckets:
    """The server. While it is `down` it answers everything with 503."""

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.down = False
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Request,), {"buckets": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def store(self, bucket: str) -> ObjectStore:
        return ObjectStore("s3", bucket, self.options)

    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": f"http://127.0.0.1:{self._server.server_port}",
            "region": "eu-west-1",
            "access_key_id": "nobody",
            "secret_access_key": "CANARY",
            "allow_http": "true",
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    buckets: Buckets

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name, objects = self._name(), self.buckets.objects
        if self.buckets.down:
            return self._answer(503)
        with self.buckets.lock:
            there = objects.get(name)
            if self.headers["If-None-Match"] == "*" and there is not None:
                return self._answer(412)
            expected = self.headers["If-Match"]
            if expected is not None and (there is None or expected != there.tag):
                return self._answer(412)
            stored = objects[name] = Stored(body, datetime.datetime.now(datetime.UTC))
        return self._answer(200, tag=stored.tag)

    def do_DELETE(self) -> None:
        if self.buckets.down:
            return self._answer(503)
        with self.buckets.lock:
            self.buckets.objects.pop(self._name(), None)
        return self._answer(204)

    def do_POST(self) -> None:
        """Several objects are deleted at once."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.buckets.down:
            return self._answer(503)
        bucket = self._name().rstrip("/")
        with self.buckets.lock:
            for key in re.findall("<Key>(.*?)</Key>", body):
                self.buckets.objects.pop(f"{bucket}/{unescape(key)}", None)
        return self._answer(200, b"<DeleteResult></DeleteResult>")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        if self.buckets.down:
            return self._answer(503)
        if "list-type" in query:
            return self._answer(200, self._listing(query.get("prefix", "")))
        stored = self.buckets.objects.get(self._name())
        if stored is None:
            return self._answer(404)
        body, asked = stored.body, self.headers["Range"]
        if asked is None:
            return self._answer(200, body, tag=stored.tag)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        low = int(first) if first else len(body) - int(last)
        high = min(int(last), len(body) - 1) if first and last else len(body) - 1
        return self._answer(206, body[low : high + 1], tag=stored.tag, place=f"bytes {low}-{high}/{len(body)}")

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/")

    def _listing(self, prefix: str) -> bytes:
        bucket = self._name().rstrip("/")
        with self.buckets.lock:
            found = sorted(self.buckets.objects.items())
        contents = "".join(
            f"<Contents><Key>{escape(name.removeprefix(f'{bucket}/'))}</Key><Size>{len(stored.body)}</Size>"
            f"<LastModified>{stored.written.isoformat()}</LastModified><ETag>{escape(stored.tag)}</ETag></Contents>"
            for name, stored in found
            if name.startswith(f"{bucket}/{prefix}")
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes = b"", *, tag: str | None = None, place: str | None = None) -> None:
        self.send_response(status)
        headers = {"ETag": tag, "Content-Range": place, "Last-Modified": formatdate(usegmt=True)}
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        # A client that has given up is no concern.
        with suppress(ConnectionError):
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
