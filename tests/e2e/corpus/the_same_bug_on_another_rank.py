# All ranks have the bug; chance decides which of them is there first.
# headline: rank 1 \(.*raised IndexError: the shard is at its end in generation 1
# next: none
# why: it failed the same way twice in a row, in the same step, after step 3, so another try would end the same way; 1 of 9
# workers: 2
# max-restarts: 9

import os
import signal

from elaunch.trainer import link

link.report(3)
if os.environ["RANK"] != os.environ["ELAUNCH_GENERATION"]:
    signal.pause()
raise IndexError("the shard is at its end")
