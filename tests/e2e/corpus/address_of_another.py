# headline: raised OSError: \[Errno 99\] Cannot assign requested address
# next: no interface of this node has that address
# slow

import socket

socket.socket().bind(("192.0.2.7", 0))
