# headline: was killed by SIGABRT \(.*free\(\): invalid pointer\)
# next: native code has written outside of its memory
# slow

import ctypes

buffer = ctypes.create_string_buffer(4096)
libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_void_p]
libc.free(ctypes.addressof(buffer) + 64)
