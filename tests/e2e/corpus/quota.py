# headline: raised OSError: \[Errno 122\] Disk quota exceeded
# next: quota is spent
# not: make room on
# slow

import errno
import os

raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/data/model.pt")
