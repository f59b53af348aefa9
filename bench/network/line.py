"""What the line between two ranks gives to a plain socket: `python -m bench.network.line BYTES`, on every rank.

Rank 0 sends to the last one; the others only wait. It prints milliseconds there and back, and Mbit/s.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

PORT = 29400
PIECE = 1 << 16
PINGS = 20


def main(nbytes: int) -> dict[str, float]:
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if rank == last:
        listener = socket.create_server(("", PORT))
        peer, _ = listener.accept()
        with listener, peer:
            for _ in range(PINGS):
                peer.sendall(_exactly(peer, 1))
            for _ in range(nbytes // PIECE):
                _exactly(peer, PIECE)
            peer.sendall(b"!")
        return {}
    if rank:
        return {}
    with _connected(os.environ["MASTER_ADDR"].rpartition(".")[0] + f".{last + 1}") as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            peer.sendall(b"?")
            _exactly(peer, 1)
            trips.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(nbytes // PIECE):
            peer.sendall(bytes(PIECE))
        _exactly(peer, 1)
        seconds = time.perf_counter() - start
    return {"trip_ms": 1000 * min(trips), "mbit": nbytes // PIECE * PIECE * 8 / seconds / 1e6}


def _connected(address: str) -> socket.socket:
    for _ in range(600):
        try:
            return socket.create_connection((address, PORT), timeout=60)
        except OSError:  # it is not listening yet
            time.sleep(0.05)
    raise TimeoutError(f"nobody answers at {address}")


def _exactly(peer: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        piece = peer.recv(nbytes - len(found))
        if not piece:
            raise ConnectionError("the other end is gone")
        found += piece
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
