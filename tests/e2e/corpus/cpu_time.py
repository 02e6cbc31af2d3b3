# headline: was killed by SIGXCPU
# next: raise the limit of CPU time
# slow

import resource

resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
while True:
    pass
