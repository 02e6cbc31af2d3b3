# options: --preload torch
# headline: raised RuntimeError: .*can't allocate memory
# next: asked for more memory than this host
# slow

import torch

torch.zeros(1 << 50)
