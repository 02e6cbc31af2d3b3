"""One line, after the import of torch."""

import torch

print("first line", torch.__version__, flush=True)
