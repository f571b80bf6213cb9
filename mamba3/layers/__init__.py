"""Layers that models are made of; each is usable alone."""

from .block import Block
from .mlp import GatedMLP
from .norm import RMSNorm
from .tmamba import MambaState, TMambaLayer
from .tmamba3 import TMamba3Layer

__all__ = ["Block", "GatedMLP", "MambaState", "RMSNorm", "TMamba3Layer", "TMambaLayer"]
