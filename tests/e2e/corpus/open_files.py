# headline: raised OSError: \[Errno 24\] Too many open files
# next: raise the limit \(ulimit -n
# slow

import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
files = [open("/dev/null") for _ in range(64)]
