# nodes: 2
# headline: rank 1 .* was killed by SIGSEGV \(crashed in .*/train\.py:\d+ in backward\)
# next: native code
# not: ^rank 0 \(
# slow

import ctypes
import os
import socket
import time
from pathlib import Path


def backward():
    ctypes.string_at(0)


if os.environ["RANK"] == "1":
    Path("peer").symlink_to(str(os.getpid()))
    while not Path("waits").exists():
        time.sleep(0.01)
    backward()
while not Path("peer").is_symlink():
    time.sleep(0.01)
Path("waits").touch()
# The survivor says that its peer is gone, as gloo does, when its parent knows that too.
while Path("/proc", Path("peer").readlink()).exists():
    time.sleep(0.01)
raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
