# The rank that does not come is still there, and is not to be called failed.
# workers: 2
# headline: rank 0 .* was killed by SIGABRT .*ALLREDUCE, number 5 on its process group, was not done after 600 s
# next: one rank did not enter this collective
# not: rank 1 \(.* (?:raised|was killed|exited)

import os
import signal
import sys

if os.environ["RANK"] == "0":
    sys.stderr.write(
        "[rank0]:[E ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,"
        " OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 Rank 0] Process"
        " group watchdog thread terminated with exception\n"
    )
    os.abort()
signal.pause()
