# shm: 1m
# headline: was killed by SIGBUS \(crashed in .*/train\.py:\d+ in fill; /dev/shm has 1 MiB in all, \d
# next: --shm-size
# not: native code
# slow

from multiprocessing import shared_memory

block = shared_memory.SharedMemory(create=True, size=4 << 20)


def fill():
    for place in range(0, block.size, 4096):
        block.buf[place] = 1


fill()
