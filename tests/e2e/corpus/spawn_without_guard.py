# headline: exited with code 1|raised RuntimeError
# next: __main__
# lines: 16
# slow

import multiprocessing

process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
raise SystemExit(process.exitcode)
