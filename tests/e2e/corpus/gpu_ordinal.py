# workers: 2
# headline: rank 1 .* raised RuntimeError: CUDA error: invalid device ordinal
# next: choose by LOCAL_RANK
# not: rank 0 \(.* (?:raised|was killed)
# slow

import os
import signal

if os.environ["RANK"] == "1":
    raise RuntimeError("CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously reported")
signal.pause()
