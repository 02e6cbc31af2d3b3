# As a std::thread that is destroyed while it runs.
# headline: was killed by SIGABRT after its program had ended with exit code 7
# next: end it before the program ends: call destroy_process_group
# not: even number of steps|drop_last
# slow

import ctypes
import sys

ctypes.CDLL(None).on_exit(ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev, None)
sys.exit(7)
