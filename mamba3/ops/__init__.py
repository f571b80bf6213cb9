"""Operations of Mamba-3, and of Mamba-1: one public function each, on any device."""

from .conv import causal_conv, causal_conv_step
from .dispatch import BACKENDS, backend, explain, use_backend
from .glu import silu_gated
from .loss import linear_cross_entropy
from .norm import add_rms_norm, rms_norm
from .scan import mamba3_scan
from .selective import selective_scan, selective_step
from .state import Mamba3State
from .steering import steering
from .step import mamba3_step
from .streams import (
    broadcast_streams,
    complex_add,
    complex_mul,
    complex_state_update,
    mix_streams,
)

__all__ = [
    "BACKENDS",
    "Mamba3State",
    "add_rms_norm",
    "backend",
    "broadcast_streams",
    "causal_conv",
    "causal_conv_step",
    "complex_add",
    "complex_mul",
    "complex_state_update",
    "explain",
    "linear_cross_entropy",
    "mamba3_scan",
    "mamba3_step",
    "mix_streams",
    "rms_norm",
    "selective_scan",
    "selective_step",
    "silu_gated",
    "steering",
    "use_backend",
]
