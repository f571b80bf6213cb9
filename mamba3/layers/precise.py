"""Modules of which some parameters stay in float32 whatever dtype the module is moved to."""

from __future__ import annotations

import torch
from torch import nn


class KeepsFloat32(nn.Module):
    """A module whose `float32_parameters`, its own by name, are never narrower than float32.

    They are few, and steer a recurrence: rounded to half precision they would change it.
    """

    float32_parameters: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):
        # .to(bfloat16), .half() and the like reach parameters through here. They follow to another
        # device, never to half precision.
        precise = {
            id(self._parameters[name])
            for name in self.float32_parameters
            if self._parameters.get(name) is not None
        }

        def keep(t):
            out = fn(t)
            if id(t) in precise and out.dtype in (torch.bfloat16, torch.float16):
                return t.to(out.device, torch.float32)
            return out

        return super()._apply(keep, recurse)
