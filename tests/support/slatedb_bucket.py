"""A small S3-compatible server on 127.0.0.1: objects of any number of buckets in memory.

It has what SlateDB and delta-rs ask of one. Conditional writes, ranges and listings are those of S3; signatures are not
looked at.

python slatedb_bucket.py    serves in a process of its own; see `serving`
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tailrace.source.slatedb.object_store import ObjectStore

_LISTING = ("prefix", "delimiter", "start-after")


class Stored(NamedTuple):
    """An object, and when it was written: garbage collectors go by that."""

    body: bytes
    written: datetime.datetime

    @property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()}"'


class Buckets:
    """The server. While it is `down` it answers everything with 503.

    `requests` counts by kind, `asked` are the paths of all GET and HEAD requests.

    A PUT of an object whose name ends in one of `unanswered` is done, but its answer is lost, once for each. With
    `ignores_conditions` a PUT overwrites whatever it is told, as some stores do. `fates` say what becomes of the next
    requests of any kind, one each: "refused" with 503, "lost" (done, but not answered) or "done".
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.asked: list[str] = []
        self.down = False
        self.ignores_conditions = False
        self.requests: Counter[str] = Counter()
        self.unanswered: list[str] = []
        self.fates: list[str] = []
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self._port = 0
        self._listen()

    def _listen(self) -> None:
        kind = type("Bound", (_Request,), {"buckets": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), kind)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def stop(self) -> None:
        """An outage: no one listens, and who is connected already gets 503."""
        self.down = True
        self.__exit__()

    def start(self) -> None:
        self.down = False
        self._listen()
        self._thread.start()

    def store(self, bucket: str) -> ObjectStore:
        return ObjectStore("s3", bucket, self.options)

    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": f"http://127.0.0.1:{self._port}",
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
    disable_nagle_algorithm = True  # an answer is written in two parts
    buckets: Buckets
    _fate = "done"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _is_refused(self) -> bool:
        with self.buckets.lock:
            self._fate = self.buckets.fates.pop(0) if self.buckets.fates else "done"
        return self.buckets.down or self._fate == "refused"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        name, objects = self._name(), self.buckets.objects
        self.buckets.requests["PUT"] += 1
        if self._is_refused():
            return self._answer(503)
        query = self._query()
        if "uploadId" in query:
            self.buckets.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return self._answer(200, tag=f'"{query["partNumber"]}"')
        with self.buckets.lock:
            there = objects.get(name)
            if self.headers["If-None-Match"] == "*" and there is not None and not self.buckets.ignores_conditions:
                return self._answer(412)
            expected = self.headers["If-Match"]
            if expected is not None and (there is None or expected != there.tag):
                return self._answer(412)
            if (copied := self.headers["x-amz-copy-source"]) is not None:
                origin = objects.get(unquote(copied).removeprefix("/"))
                if origin is None:
                    return self._answer(404)
                objects[name] = origin
                answer = f"<CopyObjectResult><ETag>{escape(origin.tag)}</ETag></CopyObjectResult>"
                return self._answer(200, answer.encode())
            stored = objects[name] = Stored(body, datetime.datetime.now(datetime.UTC))
            if lost := [end for end in self.buckets.unanswered if name.endswith(end)]:
                self.buckets.unanswered.remove(lost[0])
                self.close_connection = True
                return None
        return self._answer(200, tag=stored.tag)

    def do_DELETE(self) -> None:
        if self._is_refused():
            return self._answer(503)
        with self.buckets.lock:
            self.buckets.objects.pop(self._name(), None)
        return self._answer(204)

    def do_POST(self) -> None:
        """Several objects are deleted at once, or an upload in parts begins or ends."""
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        if self._is_refused():
            return self._answer(503)
        query = self._query()
        if "uploads" in query:
            self.buckets.requests["PUT"] += 1
            upload = uuid.uuid4().hex
            self.buckets.uploads[upload] = {}
            answer = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return self._answer(200, answer.encode())
        if "uploadId" in query:
            self.buckets.requests["PUT"] += 1
            parts = self.buckets.uploads.pop(query["uploadId"])
            whole = Stored(b"".join(parts[number] for number in sorted(parts)), datetime.datetime.now(datetime.UTC))
            with self.buckets.lock:
                self.buckets.objects[self._name()] = whole
            answer = f"<CompleteMultipartUploadResult><ETag>{escape(whole.tag)}</ETag></CompleteMultipartUploadResult>"
            return self._answer(200, answer.encode())
        bucket = self._name().rstrip("/")
        self.buckets.requests["DELETE"] += 1
        keys = re.findall("<Key>(.*?)</Key>", body)
        with self.buckets.lock:
            for key in keys:
                self.buckets.objects.pop(f"{bucket}/{unescape(key)}", None)
        done = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return self._answer(200, f"<DeleteResult>{done}</DeleteResult>".encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.buckets.asked.append(self.path)
        query = self._query()
        self.buckets.requests["LIST" if "list-type" in query else "GET"] += 1
        if self._is_refused():
            return self._answer(503)
        if "list-type" in query:
            return self._answer(200, self._listing(*(query.get(name, "") for name in _LISTING)))
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

    def _query(self) -> dict[str, str]:
        found = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        return {name: values[0] for name, values in found.items()}

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/")

    def _listing(self, prefix: str, delimiter: str, after: str) -> bytes:
        bucket = self._name().rstrip("/")
        with self.buckets.lock:
            names = {name.removeprefix(f"{bucket}/"): stored for name, stored in self.buckets.objects.items()}
        contents, folders = "", set[str]()
        for name, stored in sorted(names.items()):
            if not name.startswith(prefix) or (after and name <= after):
                continue
            rest = name.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            contents += (
                f"<Contents><Key>{escape(name)}</Key><Size>{len(stored.body)}</Size>"
                f"<LastModified>{stored.written.isoformat()}</LastModified><ETag>{escape(stored.tag)}</ETag></Contents>"
            )
        contents += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes = b"", *, tag: str | None = None, place: str | None = None) -> None:
        if self._fate == "lost":
            self.close_connection = True
            return
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


class BucketProcess:
    """A server in a process of its own, for clients that keep Python's lock while they wait."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.options: dict[str, str] = json.loads(self._said())

    def lose_answer(self, end: str) -> None:
        """The next PUT of an object whose name ends like this is done, but its answer is lost."""
        self._ask(lose=end)

    def stop(self) -> None:
        """An outage, until `start`. The objects stay."""
        self._ask(down=True)

    def start(self) -> None:
        self._ask(down=False)

    def plan(self, *fates: str) -> None:
        """What becomes of the next requests: see `Buckets`. Without any, all are done, as before."""
        self._ask(fates=fates)

    def ignore_conditions(self, ignores: bool) -> None:
        """Whether a PUT overwrites an object that is there, whatever the request says."""
        self._ask(ignores=ignores)

    def requests(self) -> dict[str, int]:
        """How many requests there were, by kind."""
        return dict(self._ask())

    def objects(self, prefix: str = "") -> dict[str, int]:
        """The objects whose name, with its bucket, begins like this, and their sizes."""
        return dict(self._ask(objects=prefix))

    def damage(self, name: str, at: int) -> None:
        """Flip a bit of an object."""
        self._ask(damage=name, at=at)

    def remove(self, name: str) -> None:
        self._ask(remove=name)

    def _ask(self, **what: object) -> dict[str, int]:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        answer: dict[str, int] = json.loads(self._said())
        return answer

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def serving() -> Iterator[BucketProcess]:
    command = [sys.executable, "-m", "tests.support.slatedb_bucket"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield BucketProcess(process)
        finally:
            process.kill()


def _serve() -> None:
    with Buckets() as buckets:
        print(json.dumps(buckets.options), flush=True)
        for line in sys.stdin:
            print(json.dumps(_do(buckets, json.loads(line))), flush=True)


def _do(buckets: Buckets, what: dict[str, Any]) -> dict[str, int]:
    if "lose" in what:
        buckets.unanswered.append(what["lose"])
    if "down" in what:
        buckets.stop() if what["down"] else buckets.start()
    if "fates" in what:
        buckets.fates = list(what["fates"])
    if "ignores" in what:
        buckets.ignores_conditions = what["ignores"]
    with buckets.lock:
        if "remove" in what:
            del buckets.objects[what["remove"]]
        if "damage" in what:
            stored = buckets.objects[what["damage"]]
            body = bytearray(stored.body)
            body[what["at"]] ^= 1
            buckets.objects[what["damage"]] = stored._replace(body=bytes(body))
        if "objects" in what:
            found = buckets.objects.items()
            return {name: len(stored.body) for name, stored in found if name.startswith(what["objects"])}
    return dict(buckets.requests)


if __name__ == "__main__":
    _serve()
