"""rendezvous.http.response takes answers apart wherever the network has cut them."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.http.response import Garbled, NotHttp, ResponseReader, request

LENGTH = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}'
CHUNKED = (
    b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'4\r\n{"a"\r\n2;name=x\r\n:1\r\nA\r\n}\r\n2345678\r\n0\r\nTrailer: x\r\n\r\n'
)
CHUNKED_BODY = b'{"a":1}\r\n2345678'


def fed(data: bytes, size: int) -> tuple[ResponseReader, bytes]:
    reply = ResponseReader()
    pieces = [reply.feed(data[i : i + size]) for i in range(0, len(data), size)]
    return reply, b"".join(pieces)


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize(("data", "status", "body"), [(LENGTH, 200, b'{"a":1}'), (CHUNKED, 404, CHUNKED_BODY)])
def test_an_answer_is_the_same_however_it_is_cut(data: bytes, status: int, body: bytes, size: int) -> None:
    reply, got = fed(data, size)

    assert (reply.status, got, reply.finished, reply.reusable) == (status, body, True, True)


@pytest.mark.parametrize("data", [LENGTH, CHUNKED])
def test_an_answer_that_ends_too_early_is_no_answer(data: bytes) -> None:
    for size in range(len(data)):
        reply, _ = fed(data[:size], 1000)
        assert not reply.finished
        with pytest.raises(Garbled):
            reply.end()


def test_without_a_length_the_connections_end_is_the_answers() -> None:
    reply, body = fed(b"HTTP/1.0 400 Bad Request\r\n\r\nnonsense", 5)
    reply.end()

    assert (reply.status, body, reply.finished, reply.reusable) == (400, b"nonsense", True, False)


def test_a_connection_that_the_server_closes_or_that_says_more_is_not_used_again() -> None:
    closes, _ = fed(LENGTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 1000)
    more, _ = fed(LENGTH + b"HTTP/1.1 200 OK", 1000)

    assert (closes.finished, closes.reusable, more.finished, more.reusable) == (True, False, True, False)


def test_an_interim_answer_is_passed_over() -> None:
    reply, body = fed(b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH, 3)

    assert (reply.status, body) == (200, b'{"a":1}')


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\x00\x02", b"HTTP/2 200\r\n\r\n"])
def test_what_is_no_http_is_seen_at_once(data: bytes) -> None:
    with pytest.raises(NotHttp):
        ResponseReader().feed(data)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 5000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    ],
)
def test_nonsense_is_refused_and_does_not_fill_memory(data: bytes) -> None:
    with pytest.raises(Garbled):
        ResponseReader().feed(data)


def test_a_header_cannot_smuggle_in_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        request("POST", "h:1", "/", {"Authorization": "x\r\nHost: elsewhere"}, b"")


def test_any_number_of_interim_answers_is_passed_over() -> None:
    reply, body = fed(b"HTTP/1.1 100 Continue\r\n\r\n" * 5000 + LENGTH, 1 << 20)

    assert (reply.status, body) == (200, b'{"a":1}')


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 \xb2\xb2\xb2 OK\r\n\r\n",
        b"HTTP/1.1 000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 1000 + b"\r\n",
    ],
)
def test_numbers_that_are_none_are_no_answer(data: bytes) -> None:
    with pytest.raises(Garbled):
        fed(data, 1 << 20)
