# headline: raised OSError: libcudart\.so\.99: cannot open shared object file
# next: libcudart\.so\.99 is not on this node's library path
# slow

import ctypes

ctypes.CDLL("libcudart.so.99")
