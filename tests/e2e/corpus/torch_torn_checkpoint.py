# options: --preload torch
# headline: raised RuntimeError: PytorchStreamReader failed
# next: the file is incomplete
# slow

import os

import torch

torch.save({"weights": torch.zeros(1000)}, "model.pt")
os.truncate("model.pt", os.path.getsize("model.pt") // 2)
torch.load("model.pt")
