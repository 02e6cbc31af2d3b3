# A child prints why it could not serve; its parent only finds a pipe that is closed.
# headline: raised EOFError
# next: needs a TMPDIR of at most 75

import multiprocessing
import os
import tempfile

if __name__ == "__main__":
    tempfile.tempdir = os.path.join(os.getcwd(), "x" * 120)
    os.mkdir(tempfile.tempdir)
    multiprocessing.Manager()
