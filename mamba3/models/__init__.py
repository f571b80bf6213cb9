"""Language models."""

from .lm import LMOutput, LMState, Mamba3LM

__all__ = ["LMOutput", "LMState", "Mamba3LM"]
