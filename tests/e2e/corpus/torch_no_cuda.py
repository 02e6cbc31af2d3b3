# options: --preload torch
# headline: raised AssertionError: Torch not compiled with CUDA enabled
# next: this torch is built for CPUs only
# slow

import torch

torch.zeros(1).cuda()
