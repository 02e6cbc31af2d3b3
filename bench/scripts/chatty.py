"""Many lines of 80 characters. Variables: BENCH_STAMPS, the file for the stamp; BENCH_LINES, how many."""

import json
import os
import time
from pathlib import Path

rank = int(os.environ["RANK"])
line = f"chatty worker {rank} ".ljust(80, ".")
with Path(os.environ["BENCH_STAMPS"]).open("a") as file:
    fields = {"generation": 0, "event": "printing", "monotonic_s": time.monotonic(), "rank": rank}
    file.write(json.dumps(fields) + "\n")
for _ in range(int(os.environ["BENCH_LINES"])):
    print(line)
