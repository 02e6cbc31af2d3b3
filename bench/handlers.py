"""Many of torch's own rendezvous handlers in one process: `python -m bench.handlers` joins at each line of stdin.

With `store PORT` the process hosts the TCPStore instead, as torchrun's first node does.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import threading
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

HOST = "127.0.0.1"


def handler(port: int, nodes: int) -> DynamicRendezvousHandler:
    """A handler as torchrun makes it."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{HOST}:{port}",
        run_id="bench",
        min_nodes=nodes,
        max_nodes=nodes,
        local_addr=HOST,
        is_host="false",
    )
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def join(handlers: list[DynamicRendezvousHandler], generation: int) -> None:
    """All handlers join at once. Reports when the last one has its rank, or what went wrong."""
    errors: list[str] = []

    def one(each: DynamicRendezvousHandler) -> None:
        try:
            each.next_rendezvous()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(each,), daemon=True) for each in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell({"trouble": errors[0]} if errors else {"generation": generation, "last_s": time.monotonic()})


def tell(words: object) -> None:
    """Send one message to the bench."""
    print(json.dumps(words), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handlers")
    parser.add_argument("what", choices=("store", "handlers"))
    parser.add_argument("port", type=int)
    parser.add_argument("nodes", type=int, nargs="?", default=0)
    parser.add_argument("count", type=int, nargs="?", default=0)
    asked = parser.parse_args()
    if asked.what == "store":
        store = TCPStore(HOST, asked.port, is_master=True, wait_for_workers=False)
        tell({"port": store.port})
        signal.pause()
    # As for elaunch's agents: in a real job each handler has a process of its own.
    gc.disable()
    handlers = [handler(asked.port, asked.nodes) for _ in range(asked.count)]
    tell({"ready": asked.count})
    for generation, _ in enumerate(sys.stdin):
        join(handlers, generation)


if __name__ == "__main__":
    main()
