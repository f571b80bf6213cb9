"""Mamba-3's operations: one public function each, on any device."""

from .dispatch import BACKENDS, backend, explain, use_backend
from .glu import silu_gated
from .loss import linear_cross_entropy
from .norm import add_rms_norm, rms_norm
from .scan import mamba3_scan
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
    "complex_add",
    "complex_mul",
    "complex_state_update",
    "explain",
    "linear_cross_entropy",
    "mamba3_scan",
    "mamba3_step",
    "mix_streams",
    "rms_norm",
    "silu_gated",
    "steering",
    "use_backend",
]
