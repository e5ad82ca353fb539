"""A TCP proxy on 127.0.0.1 that breaks connections in the ways networks do.

The forwarding is done by a process of its own: libpq holds Python's lock while it waits for bytes, and would wait
for ever for those that another thread should bring.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import subprocess
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # only a proxy with TLS needs what that module needs
    from tailrace.testing.certificate import Authority

_CHUNK_BYTES = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_TLS_REQUEST = struct.pack("!ii", 8, 80877103)  # what a PostgreSQL client asks before it talks TLS


class Proxy:
    """Forwards connections to one target until a method says otherwise.

    Every method returns when what it says is so. `tls` puts TLS before a PostgreSQL server that was built without
    it: clients have to encrypt, the way to the target stays plain.
    """

    def __init__(self, target_host: str, target_port: int, *, tls: Authority | None = None) -> None:
        self._arguments = [target_host, str(target_port), *([str(tls.cert_file), str(tls.key_file)] if tls else [])]
        self._process: subprocess.Popen[str] | None = None
        self._port: int | None = None

    @property
    def port(self) -> int:
        """The port clients connect to, the same through `refuse` and `restore`."""
        if self._port is None:
            raise RuntimeError("the proxy was never started; call start()")
        return self._port

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return self._order("count")

    def start(self) -> Self:
        """Begin to forward. Called once."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._port = self._order("restore")
        return self

    def stop(self) -> None:
        """Drop everything and refuse from now on. Does nothing the second time."""
        if self._process:
            self._process.communicate()  # end of orders
            self._process = None

    def cut(self) -> None:
        """Reset every connection there is. New ones are taken as before."""
        self._order("cut")

    def blackhole(self) -> None:
        """Take connections and bytes, pass nothing on, and close nothing: what a half-open connection looks like."""
        self._order("blackhole")

    def delay(self, seconds: float) -> None:
        """Hold every chunk of up to 64 KB for so long, in both directions."""
        self._order("delay", seconds)

    def refuse(self) -> None:
        """Refuse new connections. Those there are live on; `cut` ends them."""
        self._order("refuse")

    def restore(self) -> None:
        """Forward again, without delay. What a black hole held back is passed on now."""
        self._order("restore")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _order(self, name: str, *arguments: float) -> int:
        if not self._process or not self._process.stdin or not self._process.stdout:
            raise RuntimeError("the proxy does not run; call start()")
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class _Forwarder:
    """What runs in the proxy's process. Each order is answered with a number, when it is carried out."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        self._target = (host, port)
        self._context = context
        self._delay_seconds = 0.0
        self._passing = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._listener = self._bind(0)

    async def run(self) -> None:
        loop, orders = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        while line := await orders.readline():
            name, *arguments = json.loads(line)
            print(await self._obey(name, *arguments), flush=True)
        self._refuse()
        await self._cut()
        self._listener.close()

    async def _obey(self, name: str, seconds: float = 0.0) -> int:
        match name:
            case "cut":
                await self._cut()
            case "blackhole":
                self._passing.clear()
            case "delay":
                self._delay_seconds = seconds
            case "refuse":
                self._refuse()
            case "restore":
                self._delay_seconds = 0.0
                self._passing.set()
                if not self._server:
                    self._server = await asyncio.start_server(self._accept, sock=self._listener)
                return int(self._listener.getsockname()[1])
        return len(self._connections)

    def _refuse(self) -> None:
        if self._server:
            port = self._listener.getsockname()[1]
            self._server.close()
            self._server = None
            self._listener = self._bind(port)

    def _bind(self, port: int) -> socket.socket:
        # A port that is bound but not listened on refuses, and no one else can take it meanwhile.
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        return listener

    async def _cut(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self._passing.wait()
            if self._context:
                await self._encrypt(reader, writer, self._context)
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            writers.append(target_writer)
            ways = [
                asyncio.create_task(self._forward(reader, target_writer)),
                asyncio.create_task(self._forward(target_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except asyncio.CancelledError:
            for each in writers:
                each.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                each.transport.abort()
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two ends is gone; the other learns it by the close below
        finally:
            for each in writers:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _encrypt(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> None:
        while (request := await reader.readexactly(8)) != _TLS_REQUEST:
            if request[:4] != _TLS_REQUEST[:4]:
                raise ConnectionRefusedError("this client does not ask for TLS")
            writer.write(b"N")  # another kind of encryption was asked for; the client tries TLS next
        writer.write(b"S")
        await writer.start_tls(context)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            data = await reader.read(_CHUNK_BYTES)
            if self._delay_seconds:
                await asyncio.sleep(self._delay_seconds)
            await self._passing.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()


async def _main(host: str, port: str, *certificate: str) -> None:
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
    await _Forwarder(host, int(port), context).run()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
