"""Low-rank adapters (LoRA, Hu et al. 2021) by the peft library: trained beside frozen weights."""

from __future__ import annotations

import torch
from torch import nn

from mamba3.hub import filled
from mamba3.models.lm import Mamba3LM

# The projections of mixers and MLPs.
TARGETS = ("in_proj", "x_proj", "dt_proj", "out_proj", "fc1", "fc2")
# Relative difference between logits before and after a merge that is put down to rounding.
ROUNDING = 1e-3


def add_adapters(model: Mamba3LM, rank: int, alpha: float) -> None:
    """Put adapters beside all projections of a model, in place; all other weights are frozen.

    Args:
        model: to be trained.
        rank: of the adapters.
        alpha: their product is added with the factor alpha / rank.

    Raises:
        RuntimeError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise RuntimeError(
            f"low-rank adapters need peft, which is not installed ({error}): "
            "python -m pip install 'mamba3[lora]'"
        ) from error
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(TARGETS))
    inject_adapter_in_model(config, model)


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """A model without adapters that computes the same; the model itself if it has none.

    Raises:
        RuntimeError: it does not compute the same.
    """
    adapted = {name: m for name, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    if not adapted:
        return model
    weights = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        module, _, last = name.partition(".base_layer.")
        if last == "weight":
            delta = sum(adapted[module].get_delta_weight(one) for one in adapted[module].lora_A)
            tensor = tensor + delta.to(tensor.dtype)
        weights[name.replace(".base_layer.", ".")] = tensor
    plain = filled(Mamba3LM(model.config, device="meta"), weights)
    _check_same(model, plain)
    return plain


def _check_same(model: nn.Module, plain: nn.Module) -> None:
    device = next(model.parameters()).device
    ids = torch.arange(32, device=device)[None] % model.config.vocab_size
    training = model.training
    before, after = model.eval()(ids).logits, plain(ids).logits
    model.train(training)
    error = (after - before).norm() / before.norm()
    if not error <= ROUNDING:
        raise RuntimeError(
            f"merging the adapters changed the logits by {error:.1e}, more than {ROUNDING:g}, the "
            "most that rounding explains; nothing was saved"
        )
