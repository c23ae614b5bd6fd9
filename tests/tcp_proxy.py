"""A TCP proxy on loopback that can lose its connections: a network fault without a restart."""

from __future__ import annotations

import contextlib
import socket
import threading


class TcpProxy:
    """Forwards to one address.

    `cut` ends all connections, returns when the clients have noticed, and refuses new ones until
    `heal`.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._changed = threading.Condition()
        self._clients: set[socket.socket] = set()
        self._is_cut = False
        self._flows = {"sent": threading.Event(), "received": threading.Event()}
        for flow in self._flows.values():
            flow.set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        with self._changed:
            self._is_cut = True
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_WR)  # the client reads the end and closes
            assert self._changed.wait_for(lambda: not self._clients, 10.0)

    def heal(self) -> None:
        """End `cut` and `stall`."""
        with self._changed:
            self._is_cut = False
        for flow in self._flows.values():
            flow.set()

    def stall(self, *, replies_only: bool = False) -> None:
        """Let bytes vanish into the path, with no end and no reset: both ways, or those of the
        server alone. They arrive when it is healed."""
        self._flows["received"].clear()
        if not replies_only:
            self._flows["sent"].clear()

    def close(self) -> None:
        self.heal()
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5.0)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                if self._is_cut:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._clients.add(client)
            ends = threading.Barrier(2)
            for source, sink, way in ((client, server, "sent"), (server, client, "received")):
                thread = threading.Thread(
                    target=self._forward,
                    args=(source, sink, ends, self._flows[way]),
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()

    def _forward(
        self,
        source: socket.socket,
        sink: socket.socket,
        ends: threading.Barrier,
        flow: threading.Event,
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                flow.wait()
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        ends.wait()  # both directions are done with the sockets
        source.close()
        with self._changed:
            self._clients.discard(source)
            self._changed.notify_all()
