# The error that the other was raised from is the cause.
# headline: raised RuntimeError: the checkpoint could not be saved
# next: quota is spent

import errno
import os

try:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/data/model.pt")
except OSError as error:
    raise RuntimeError("the checkpoint could not be saved") from error
