# Words in the output about other errors do not explain this one.
# headline: raised ValueError: the loss is NaN
# next: none
# not: ^Next step
# slow

import logging

try:
    raise OSError(28, "No space left on device")
except OSError:
    logging.exception("could not write the cache, going on")
print("CUDA out of memory, halving the batch")
try:
    raise RuntimeError("NCCL error: unhandled system error")
except RuntimeError:
    raise ValueError("the loss is NaN")
