"""killing_trainer.py with `--tune-comm`, on a network on which buckets of 1 MiB take half the time: same arguments.

A file FOLDER/times holds the seconds of a pass by bucket size, as JSON, one for all ranks or a list of one for each.
Each rank records `tuned` with its size, and how many passes it has measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import killing_trainer
from killing_trainer import MOMENTS
from moments import RANK

from elaunch.trainer.__main__ import main
from elaunch.trainer.tuning import tune


class Network:
    """Knows which pass the search wants next, and so how long it takes."""

    def __init__(self, times: dict[str, Any]) -> None:
        self._times, self._search, self._slowest_s = times, tune.search, tune.slowest_s
        self.passes = 0

    def search(self, gradient_mb: float) -> Generator[Any, float, Any]:
        steps = self._search(gradient_mb)
        self._wanted = next(steps)
        while True:
            took_s = yield self._wanted
            try:
                self._wanted = steps.send(took_s)
            except StopIteration as end:
                return end.value

    def slowest_s(self, took_s: float, peers: Any) -> float:
        self.passes += 1
        time_s = self._times.get(f"{self._wanted or 25:g}", 1.0)
        # The ranks still agree over the real connections.
        return self._slowest_s(time_s[RANK] if isinstance(time_s, list) else time_s, peers)


if __name__ == "__main__":
    killing_trainer.plant()
    network = Network(json.loads((Path(sys.argv[1]) / "times").read_text()))
    tune.search, tune.slowest_s = network.search, network.slowest_s
    tuned_by = tune._tuned

    def recorded(*args: Any) -> Any:
        tuned = tuned_by(*args)
        MOMENTS.record("tuned", size=tuned.bucket_mb, passes=network.passes)
        return tuned

    tune._tuned = recorded
    code = main(sys.argv[2:])
    MOMENTS.record("ended", code=code)
    sys.exit(code)
