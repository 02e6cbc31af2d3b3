# A mapped file became shorter. /dev/shm has room, and is not to blame.
# headline: was killed by SIGBUS \(crashed in .*/train\.py:\d+ in read\)
# next: none
# not: shm
# slow

import mmap
import os


def read(mapped):
    return mapped[0]


with open("data.bin", "w+b") as file:
    file.write(b"x" * 4096)
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
    os.truncate(file.fileno(), 0)
    read(mapped)
