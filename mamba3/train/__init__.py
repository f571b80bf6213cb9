"""Training: recipes, the one training loop, checkpoints that continue exactly, fine-tuning."""

from mamba3.train.config import Recipe, load_recipe
from mamba3.train.finetune import FinetuneResult, finetune
from mamba3.train.run import TrainResult, train
from mamba3.train.signals import Stopped

__all__ = ["FinetuneResult", "Recipe", "Stopped", "TrainResult", "finetune", "load_recipe", "train"]
