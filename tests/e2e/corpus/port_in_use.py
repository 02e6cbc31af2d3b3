# headline: raised OSError: \[Errno 98\] Address already in use
# next: another process listens on that port
# not: lost a peer
# slow

import socket

first = socket.create_server(("127.0.0.1", 0))
socket.create_server(first.getsockname())
