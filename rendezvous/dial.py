"""A TCP connection to a host that may have several addresses, over a network that may lose packets."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

from elaunch.rendezvous.resolve import Address

# The kernel asks again after a second at first, which may be all the time that there is.
_AGAIN_S = 0.2
# A connection whose other end is gone for good is given up after this long: what was sent is not acknowledged, or the
# kernel's own questions on an idle one are not answered.
_GONE_MS = 5000
_IDLE_S, _ASK_EVERY_S = 2, 1


def dial(addresses: Sequence[Address], left: Callable[[], float]) -> socket.socket:
    """The first connection that one of these addresses takes; `left` says how many seconds there are still, or raises.

    The next is tried when one has refused, or is silent for a moment, while those before are still waited for
    (RFC 8305); when all are silent they are asked again. So a lost packet costs a moment. The socket does not block.
    Raises the last refusal's OSError when all have refused.
    """
    untried, refusal = deque(addresses), OSError("it has no address")
    tries: dict[int, tuple[socket.socket, Address]] = {}
    poll = select.poll()
    try:
        while untried or tries:
            if untried:
                address = untried.popleft()
                try:
                    begun = _begin(address)
                except OSError as error:
                    refusal = error
                    continue
                tries[begun.fileno()] = begun, address
                poll.register(begun, select.POLLOUT)
            ready = poll.poll(1000 * min(_AGAIN_S, left()))
            for fd, _ in ready:
                tried, _ = tries[fd]
                if not (code := tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    _set_options(tried)
                    return tries.pop(fd)[0]
                refusal = OSError(code, os.strerror(code))
                poll.unregister(fd)
                tries.pop(fd)[0].close()
            if not ready and not untried:
                untried.extend(dict.fromkeys(address for _, address in tries.values()))
        raise refusal
    finally:
        for tried, _ in tries.values():
            tried.close()


def _begin(address: Address) -> socket.socket:
    family, place = address
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        made.connect(place)
    except BlockingIOError:
        pass
    except OSError:
        made.close()
        raise
    return made


def _set_options(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
