"""Mamba-3 for PyTorch: layers, language models, training and checkpoints."""

__version__ = "0.1.0"
