"""How a language model's weights start."""

from __future__ import annotations

import math

import torch
from torch import nn


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """Initialise every parameter of a `Mamba3LM`, from torch's global generator; nothing on meta.

    | tensor | distribution |
    |---|---|
    | embedding, untied lm_head | normal, std 0.02 |
    | mixer.* | `TMamba3Layer.reset_parameters`, `TMambaLayer.reset_parameters` |
    | mixer.in_proj.bias, mixer.out_proj.bias | 0 |
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
    for block in model.backbone.layers:
        for part in block.children():
            part.reset_parameters()
    model.backbone.norm_f.reset_parameters()
    for name, parameter in model.named_parameters():
        if name.endswith(("mixer.out_proj.weight", "mlp.fc2.weight")):
            parameter.div_(math.sqrt(additions))
        elif name.endswith((".in_proj.bias", ".out_proj.bias")):
            nn.init.zeros_(parameter)
    for weight in (model.backbone.embedding.weight, model.lm_head.weight):
        nn.init.normal_(weight, std=0.02)
