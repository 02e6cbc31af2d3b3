# headline: raised .*MemoryError: Unable to allocate
# next: asked for more memory than this host
# slow

import numpy

numpy.ones(1 << 45)
