# headline: raised OutOfMemoryError: CUDA out of memory\. Tried to allocate 2\.00 GiB
# next: another process \(pid 77\) holds 40\.00 GiB on that GPU
# not: --shm-size|data set in each rank
# slow

class OutOfMemoryError(RuntimeError):
    pass


raise OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 512.00 MiB is"
    " free. Process 77 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has 38.60 GiB memory in"
    " use. Of the allocated memory 37.50 GiB is allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but"
    " unallocated."
)
