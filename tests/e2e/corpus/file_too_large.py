# headline: raised OSError: \[Errno 27\] File too large
# next: the limit of this user \(ulimit -f\)
# not: make room
# slow

import resource

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with open("model.pt", "wb", 0) as file:
    while True:
        file.write(bytes(4096))
