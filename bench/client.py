"""What one client of the store costs: `python -m bench.client HOST:PORT [gateway|grpc]` on an etcd of its own.

Prints one line with five figures: the time from no client to the first write's answer; the memory that this took;
single writes; the time from the start of a write until a watch reports it; writes of 8 threads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

WRITES = 3000
THREADS = 8
PREFIX = "/elaunch/bench/"


def main(address: str, transport: str = "gateway") -> None:
    memory_mb, began_s = resident_mb(), time.perf_counter()
    # The cost of these imports is measured too.
    from elaunch.rendezvous.endpoint import Access, Endpoint
    from elaunch.rendezvous.etcd.store import EtcdStore
    from elaunch.rendezvous.store import Changes, Put, Txn, Update, View

    host, _, port = address.rpartition(":")
    carrier = None
    if transport == "grpc":
        from elaunch.rendezvous.etcd.grpc_transport import GrpcTransport

        carrier = GrpcTransport(Access())
    store = EtcdStore([Endpoint(host.strip("[]"), int(port))], deadline_s=10, transport=carrier)

    def write() -> int:
        return store.commit(Txn((), (Put(f"{PREFIX}key", "x" * 200),))).revision

    write()
    ready_ms, memory_mb = (time.perf_counter() - began_s) * 1e3, resident_mb() - memory_mb
    writes = [timed(write) for _ in range(WRITES)]

    told: dict[int, float] = {}
    word = threading.Condition()

    def tell(update: Update) -> None:
        with word:
            if isinstance(update, (Changes, View)):
                told[update.revision] = time.perf_counter()
            word.notify()

    watch = store.watch(PREFIX, write(), tell)
    delays = []
    for _ in range(WRITES // 3):
        sent_s = time.perf_counter()
        revision = write()
        with word:
            word.wait_for(lambda wanted=revision: wanted in told)  # type: ignore[misc]
        delays.append(told[revision] - sent_s)
    watch.close()

    def write_in_threads() -> None:
        threads = [threading.Thread(target=lambda: [write() for _ in range(WRITES // THREADS)]) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    elapsed_s = timed(write_in_threads)
    print(
        f"{transport}: first answer {ready_ms:.0f} ms, {memory_mb:.1f} MB; write {figures(writes)} µs; "
        f"watch {figures(delays)} µs; {THREADS} threads {WRITES // THREADS * THREADS / elapsed_s:.0f} writes/s"
    )
    store.close()


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def figures(samples_s: list[float]) -> str:
    """Median and 99th percentile, in microseconds."""
    ordered = sorted(samples_s)
    return f"{ordered[len(ordered) // 2] * 1e6:.0f}/{ordered[len(ordered) * 99 // 100] * 1e6:.0f}"


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    main(*sys.argv[1:])
