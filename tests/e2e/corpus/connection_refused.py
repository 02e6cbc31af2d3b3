# headline: raised ConnectionRefusedError: \[Errno 111\]
# next: nobody listens at that address and port
# not: lost a peer
# slow

import socket

with socket.create_server(("127.0.0.1", 0)) as server:
    address = server.getsockname()
socket.create_connection(address)
