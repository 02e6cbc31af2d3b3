# nodes: 2
# headline: rank 1 .* was killed by SIGSEGV \(crashed in .*/train\.py:\d+ in backward\)
# next: native code
# not: ^rank 0 \(

import ctypes
import os
import socket
import time
from pathlib import Path


def backward():
    ctypes.string_at(0)


if os.environ["RANK"] == "1":
    while not Path("waits").exists():
        time.sleep(0.01)
    backward()
# The survivor says that its peer is gone, as gloo does, as soon as it hears of it.
Path("waits").touch()
time.sleep(1.0)
raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
