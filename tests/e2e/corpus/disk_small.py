# disk: 64k
# Another file system of the machine may be full too.
# headline: raised OSError: \[Errno 28\] No space left on device \(.*/disk has 0 B free of 64 KiB
# next: make room on .*/disk
# not: /dev/shm
# slow

import os

os.chdir("disk")
with open("model.pt", "wb", 0) as file:
    while True:
        file.write(bytes(4096))
