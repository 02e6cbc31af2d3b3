# headline: raised (?:socket\.)?gaierror: \[Errno -[235]\]
# next: the host name is not known here
# slow

import socket

socket.getaddrinfo("no host has this name", 29500)
