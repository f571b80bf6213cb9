"""How a language model's weights start."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..layers import RMSNorm, TMamba3Layer


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """Initialise every parameter of a `Mamba3LM`, from torch's global generator; nothing on meta.

    | tensor | distribution |
    |---|---|
    | embedding, untied lm_head | normal, std 0.02 |
    | mixer.* | `TMamba3Layer.reset_parameters` |
    | mlp.fc1 | kaiming-uniform, bound 1/sqrt(fan_in) |
    | mixer.out_proj, mlp.fc2 | the same, divided by sqrt(residual additions) |
    | norms | 1 |

    A block adds to the residual stream twice, or once without an MLP, so n_layer blocks make
    2 * n_layer or n_layer additions, and the stream's variance does not grow with depth.
    """
    if model.lm_head.weight.is_meta:
        return
    config = model.config
    additions = config.n_layer * (2 if config.mlp_width else 1)
    for module in model.modules():
        if isinstance(module, TMamba3Layer | RMSNorm | nn.Linear):
            module.reset_parameters()
    for name, parameter in model.named_parameters():
        if name.endswith(("mixer.out_proj.weight", "mlp.fc2.weight")):
            parameter.div_(math.sqrt(additions))
    for weight in (model.backbone.embedding.weight, model.lm_head.weight):
        nn.init.normal_(weight, std=0.02)
