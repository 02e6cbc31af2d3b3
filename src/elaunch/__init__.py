"""elaunch: start PyTorch training jobs and keep them alive."""

__version__ = "0.1.0"
