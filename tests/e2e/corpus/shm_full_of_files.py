# A semaphore is a file in /dev/shm; its error names no path.
# shm: 1m
# headline: raised OSError: \[Errno 28\] No space left on device \(/dev/shm has 1 MiB in all, 0 B free\)
# next: make room on /dev/shm, which semaphores
# not: write somewhere else

import multiprocessing

with open("/dev/shm/left", "wb", buffering=0) as file:
    while True:
        try:
            file.write(bytes(4096))
        except OSError:
            break
multiprocessing.Lock()
