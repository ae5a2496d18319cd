"""An answer leaves when it is written, on connections that are kept as on new ones."""

from __future__ import annotations

import socket

from nonet.serve.server import Address, listen


def test_no_answer_waits_for_its_headers_to_be_acknowledged():
    # With Nagle's algorithm on, the body of a small answer waits for the client's delayed ACK: 40 ms a request.
    with listen(Address(port=0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
