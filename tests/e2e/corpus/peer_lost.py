# The survivor fails first, by its peer's death; the report names the peer alone.
# workers: 2
# options: --no-preload --failure-grace 300
# headline: rank 1 .* raised ValueError: shard 3 is torn
# next: none
# not: ^rank 0 \(

import os
import signal
import sys
from pathlib import Path


def torn(*_):
    raise ValueError("shard 3 is torn")


if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, torn)
    Path("ready").touch()
    while True:
        signal.sigtimedwait([], 0.05)
while not Path("ready").exists():
    signal.sigtimedwait([], 0.01)
raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
