# headline: raised ProcessExitedException: process 0 terminated with exit code 1
# next: __main__
# lines: 16

import multiprocessing


class ProcessExitedException(Exception):
    """As torch.multiprocessing.spawn raises it for a child process that has ended."""


process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
raise ProcessExitedException(f"process 0 terminated with exit code {process.exitcode}")
