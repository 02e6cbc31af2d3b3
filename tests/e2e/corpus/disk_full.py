# /dev/full is a disk without room; its error names no path.
# headline: raised OSError: \[Errno 28\] No space left on device
# next: make room on
# not: quota|/dev/shm has

import os

os.write(os.open("/dev/full", os.O_WRONLY), b"checkpoint")
