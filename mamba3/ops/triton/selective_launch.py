"""Launchers of `mamba3.ops.triton.selective`: layouts, tile sizes and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..recording import keep
from . import selective
from .launch import launch, on_device, token_rows, token_stride
from .layout import can_pipeline, layout, multiprocessors

# Tokens of a chunk. A thread keeps some ten numbers for each of them.
CHUNK = 16
# Channels and warps of a program.
BLOCK_D, WARPS, STAGES = 64, 2, 4
# Programs per multiprocessor that sequences are cut into segments for.
PROGRAMS_PER_SM = 4


class Inputs(NamedTuple):
    """Arguments of a scan on the way to its kernels; see `mamba3.ops.selective_scan`.

    x, dt and z are as `token_rows` gives them; a is (N, D), it and d are float32; h is float32,
    (sequences, N, D).
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    z: Tensor | None
    h: Tensor | None

    @classmethod
    def of(cls, x, dt, a, b, c, d, z, h) -> Inputs:
        """From arguments in their public order and shapes."""
        x, dt, b, c = (token_rows(t, 1) for t in (x, dt, b, c))
        z = None if z is None else token_rows(z, 1)
        d = None if d is None else d.float().contiguous()
        h = None if h is None else h.float().mT.contiguous()
        return cls(x, dt, a.float().T.contiguous(), b, c, d, z, h)


class SelectiveScan:
    """One scan's launches; holds sizes and where tokens lie, tensors are passed.

    Args:
        inputs: of the scan; only their sizes are kept.
        bounds: boundaries of the sequences in the flattened tokens, packed or not.
        softplus: step sizes are the softplus of dt.
    """

    def __init__(self, inputs: Inputs, bounds: Sequence[int], softplus: bool):
        x = inputs.x
        self.channels, self.d_state = x.shape[-1], len(inputs.a)
        self.blocks = triton.cdiv(self.channels, BLOCK_D)
        self.sequences = len(bounds) - 1
        walks = max(1, self.sequences * self.blocks)
        per_sequence = max(1, PROGRAMS_PER_SM * multiprocessors(x.device) // walks)
        self.layout = layout(bounds, CHUNK, per_sequence, x.device)
        keep(self.layout)
        self.chunks, self.segments = len(self.layout.table), len(self.layout.segments)
        strides = (None if t is None else token_stride(t.shape, t.stride(), 1)
                   for t in (x, inputs.z, inputs.dt))  # fmt: skip
        self.strides = [stride or 0 for stride in strides]
        stages = STAGES if can_pipeline(x.device) else 1
        self.tile = {
            "N": self.d_state, "T": CHUNK, "BLOCK_D": BLOCK_D, "SOFTPLUS": softplus,
            "GATE": inputs.z is not None, "STAGES": stages,
            "num_warps": WARPS, "num_stages": stages,
        }  # fmt: skip
        self.skip = inputs.d is not None

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output, the state after every sequence (sequences, N, D), and for `backward` the maps
        and the states before all chunks, which are kept with `training` alone."""
        x, dt, a, b, c, d, z, h = inputs
        maps = self._floats(self.chunks, self.d_state, 2, CHUNK)
        block_n = triton.next_power_of_2(self.d_state)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        states = self.d_state, self.channels
        borders = self._floats(self.chunks if training else self.segments, *states)
        final = self._floats(self.sequences, *states)
        strides = [token_stride(t.shape, t.stride(), 1) for t in (b, c)]
        with on_device(x):
            if self.chunks:
                launch(
                    selective.maps_kernel, (self.chunks,),
                    b, c, self.layout.table, maps, *strides, b.stride(-1), c.stride(-1),
                    N=self.d_state, T=CHUNK, BLOCK_N=block_n, num_warps=1,
                )  # fmt: skip
            ends, total = self._ends(inputs, maps, x, reverse=False)
            launch(
                selective.forward_kernel, (self.segments, self.blocks),
                x, _or(z, x), dt, a, _or(d, a), maps, *self.layout[:2], ends, total, _or(h, a), y,
                borders, final, *self.strides, self.channels, 1,
                **self.tile, SKIP=self.skip, HAS_START=h is not None, KEEP=training,
            )  # fmt: skip
        return y, final, maps, borders

    def backward(
        self, inputs: Inputs, maps: Tensor, borders: Tensor, dy: Tensor, d_final: Tensor | None
    ) -> Inputs:
        """Gradients of the inputs, in the shapes of the public arguments.

        Args:
            dy, d_final: those of the output and of the last states, (sequences, N, D) or None.
        """
        x, dt, a, b, c, d, z, h = inputs
        block_n = max(16, triton.next_power_of_2(self.d_state))
        dx, d_dt, d_b, d_c, dz = (
            None if t is None else torch.empty(t.shape, dtype=t.dtype, device=x.device)
            for t in (x, dt, b, c, z)
        )
        states = self.d_state, self.channels
        d_a, d_h = (self._floats(self.segments, *states) for _ in range(2))
        d_d, d_start = (
            self._floats(self.segments, self.channels),
            self._floats(self.sequences, *states),
        )
        d_maps = self._floats(self.blocks, self.chunks, 2, CHUNK, block_n)
        # Sums over channels by tensor cores: their factors are halves, and one is 0 or 1.
        native = x.is_cuda and not triton.knobs.runtime.interpret
        dot = native and x.dtype != torch.float32
        with on_device(x):
            ends, total = self._ends(inputs, maps, dy, reverse=True)
            launch(
                selective.backward_kernel, (self.segments, self.blocks),
                x, _or(z, x), dt, a, _or(d, a), maps, *self.layout[:2], ends, total, dy,
                _or(d_final, a), borders, dx, _or(dz, dx), d_dt, d_a, d_d, d_maps, d_h, d_start,
                *self.strides, self.channels, self.chunks, 1,
                **self.tile, BLOCK_N=block_n, SKIP=self.skip, HAS_START=h is not None,
                HAS_FINAL=d_final is not None, DOT=dot,
            )  # fmt: skip
            if self.chunks:
                launch(
                    selective.map_gradients_kernel, (self.chunks, 2),
                    d_maps, self.layout.table, d_b, d_c, self.blocks, self.chunks,
                    N=self.d_state, T=CHUNK, BLOCK_N=block_n, num_warps=1,
                )  # fmt: skip
        d_d = d_d.sum(0) if self.skip else None
        d_start = None if h is None else d_start.mT
        return Inputs(dx, d_dt, d_a.sum(0).T, d_b, d_c, d_d, dz, d_start)

    def _ends(self, inputs: Inputs, maps: Tensor, rows: Tensor, reverse: bool):
        """What segments that start from nothing end with; unused where none follows another."""
        ends = self._floats(self.segments, self.d_state, self.channels)
        total = self._floats(self.segments, self.channels)
        if self.segments > self.sequences:
            x_stride, z_stride, dt_stride = self.strides
            launch(
                selective.ends_kernel, (self.segments, self.blocks),
                rows, _or(inputs.z, rows), inputs.dt, inputs.a, maps, *self.layout[:2], ends, total,
                self.channels if reverse else x_stride, z_stride, dt_stride, self.channels, 1,
                **self.tile, REVERSE=reverse,
            )  # fmt: skip
        return ends, total

    def _floats(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=self.layout.table.device)


def _or(t: Tensor | None, other: Tensor) -> Tensor:
    """Something to pass in the place of a tensor that is not there."""
    return other if t is None else t
