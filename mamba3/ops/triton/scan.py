"""Launchers of the scan's kernels: layouts, tile sizes, buffers; formulas are with the kernels."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import triton
from torch import Tensor

from ..recording import keep
from . import chunk, scan_backward, scan_forward
from .launch import Launcher, compile_all, facts, stride_unit, token_stride
from .layout import (
    Layout,
    Sizes,
    can_pipeline,
    layout,
    layout_of,
    layout_on_device,
    multiprocessors,
)

# Walks per multiprocessor that a scan is cut into, as many as run at a time.
PROGRAMS_PER_SM = 2
# Warps and pipeline stages of a kernel, measured on Hopper. There is no search at run time: a first
# call compiles one configuration, and two processes always run the same one.
CONFIGS = {
    "states": (4, 2),
    "states of streams": (4, 1),
    "outputs": (4, 1),
    "readouts": (4, 1),
    "inputs": (4, 1),
}
# Elements of dk and dq that exist at a time; 256 MB in half precision.
SLAB_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernels' tiles, by the widths and the dtype alone."""

    rows: int
    br: int
    block_p: int
    half: int
    angles: int

    @classmethod
    def of(cls, rank, headdim, d_state, angles, dtype, chunk_size) -> Tiles:
        # Products of 64 rows of half precision are made by Hopper's warp groups. Where factors in
        # one kernel differ in width up to 64, ptxas before 12.9 loses the address of one, and
        # multiplies by what lies elsewhere: they are all padded to that.
        least = 16 if dtype == torch.float32 else 64
        half = max(least, triton.next_power_of_2(d_state // 2))
        br = triton.next_power_of_2(rank)
        # Tiles of float32 are twice as large in shared memory, as are those of a wide state.
        narrow = dtype == torch.float32 or half > 64
        rows = max(32 if narrow else 64, br)
        widest = 32 if dtype == torch.float32 or rows == 32 else 64
        block_p = min(widest, max(least, triton.next_power_of_2(headdim)))
        if chunk_size is not None:
            rows = min(rows, max(16, br * triton.next_power_of_2(chunk_size)))
        return cls(rows, br, block_p, half, triton.next_power_of_2(max(1, angles)))

    @property
    def chunk_size(self) -> int:
        return self.rows // self.br


class Chunks(NamedTuple):
    """What every kernel of a scan reads; see the legend of `chunk`."""

    maps: Tensor
    weights: Tensor
    turns: Tensor
    phase: Tensor


class States(NamedTuple):
    """States at the chunks' borders and what is needed to complete them; see `chunk_state`."""

    inner: Tensor
    lead: Tensor
    carried: Tensor


class Inputs(NamedTuple):
    """Tensor arguments of a scan, tokens as `token_rows` has them; see `mamba3.ops.mamba3_scan`."""

    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    a: Tensor
    lam: Tensor
    rate: Tensor
    b_bias: Tensor
    c_bias: Tensor
    d: Tensor
    mimo_x: Tensor | None

    @property
    def mimo(self) -> Tensor:
        """mimo_x, or for SISO something to pass in its place."""
        return self.d if self.mimo_x is None else self.mimo_x


class Scan:
    """One scan's launches; holds sizes only, tensors are passed."""

    @classmethod
    def of(cls, inputs: Inputs, bounds: Sequence[int] | Tensor, chunk_size: int | None) -> Scan:
        """The scan of these inputs, by the one made for all of the same sizes.

        Args:
            inputs: of the scan.
            bounds: of the sequences; a tensor where the host cannot know them.
            chunk_size: tokens of a chunk, at most; None is what is fast.
        """
        made = cls._cached(facts(*inputs), len(bounds) - 1, chunk_size, PROGRAMS_PER_SM)
        scan = copy.copy(made)
        scan.layout = made._laid_out(bounds)
        scan.count, scan.segments = len(scan.layout.table), len(scan.layout.segments)
        keep(scan.layout)
        return scan

    # By all that compiled kernels depend on: launchers, and what `prepare` has compiled.
    _launchers: ClassVar[dict] = {}
    _prepared: ClassVar[set] = set()

    @classmethod
    @functools.lru_cache(maxsize=64)
    def _cached(cls, *args) -> Scan:
        return cls(*args)

    layout: Layout
    count: int
    segments: int

    def __init__(self, known: tuple, sequences: int, chunk_size, per_multiprocessor: int):
        self.shapes = inputs = Inputs(
            *(
                None if f is None else torch.empty_strided(*f[1:3], dtype=f[0], device="meta")
                for f in known
            )
        )
        device = known[0][4]
        x, mimo = inputs.x, inputs.mimo_x is not None
        self.device, self.dtype = device, x.dtype
        self.batch, self.tokens, self.sequences = x.shape[:2], x.shape[:2].numel(), sequences
        self.heads, self.headdim = x.shape[2:]
        self.rank, groups, self.d_state = inputs.b.shape[2:]
        self.angles, self.per_group = inputs.rate.shape[2], self.heads // groups
        self.tiles = tiles = Tiles.of(
            self.rank, self.headdim, self.d_state, self.angles, x.dtype, chunk_size
        )
        self.parts = triton.cdiv(self.headdim, tiles.block_p)
        # Walks for each head and part that fill the chip.
        self.walks = per_multiprocessor * multiprocessors(device) // (self.heads * self.parts)

        inner = (2, 3, 3, 1, 1, 1, 1)
        strides = [token_stride(*f[1:3], n) for f, n in zip(known[:7], inner, strict=True)]
        self.x_stride, *self.maps_strides = strides[:3]
        self.weights_strides, self.rate_stride = strides[3:6], strides[6]
        unit, maps_unit = stride_unit(self.x_stride), stride_unit(*self.maps_strides)
        self.x_stride //= unit
        self.maps_strides = [stride // maps_unit for stride in self.maps_strides]

        native = device.type == "cuda" and torch.version.hip is None
        native = native and not triton.knobs.runtime.interpret
        sizes = {"R": self.rank, "G": groups, "N": self.d_state, "HALF": tiles.half, "MIMO": mimo}
        self.copied = sizes | {"UNIT": maps_unit, "BLOCK": 32, "num_warps": 4}
        self.phased = {"S": self.angles, "BLOCK_S": tiles.angles}
        self.summed = sizes | {"S": self.angles, "ROWS": tiles.rows, "BR": tiles.br}
        self.full = self.summed | {"P": self.headdim, "BLOCK_P": tiles.block_p, "UNIT": unit}
        self.full |= {"FAST": native, "PRECISION": "tf32x3" if native else "ieee"}
        kinds = (None if f is None else (f[0], f[3]) for f in known)
        self.form = (device, self.heads, *self.full.items(), *strides, *kinds)
        self.launch = self._launchers.setdefault(self.form, Launcher())

    def _laid_out(self, bounds: Sequence[int] | Tensor) -> Layout:
        size, known = self.tiles.chunk_size, not isinstance(bounds, Tensor)
        if known and bounds[-1] != bounds[-2]:
            return layout(bounds, size, max(1, self.walks // self.sequences), self.device)
        # With room for others, as batches of packed rows have it: the layout is then the same,
        # but for its values, whether the host knows them or not.
        sizes = Sizes.of_any(self.sequences, self.tokens, size, self.walks)
        return layout_of(bounds, sizes, self.device) if known else layout_on_device(bounds, sizes)

    def prepare(self, training: bool) -> None:
        """Compile what a first pass launches, all at once: one by one takes several times as long.

        Args:
            training: also what the backward pass launches.
        """
        if (self.form, training) in self._prepared:
            return
        self._prepared.add((self.form, training))
        if self.device.type == "cuda" and not triton.knobs.runtime.interpret:
            compile_all(self.launches(training), self.device)

    def launches(self, training: bool) -> list[tuple]:
        """What passes of any length launch without a state; with `training`, backward ones too."""
        shadow, found = copy.copy(self), []
        shadow.device = torch.device("meta")
        shadow.segments = self.sequences + 1  # longer sequences have several segments
        shadow.launch = lambda kernel, grid, *args, variant=None, **constants: found.append(
            (kernel, args, constants)
        )
        inputs = self.shapes
        chunks, _ = shadow.chunks(inputs, None)
        states, _ = shadow.states(inputs, chunks, inputs.x, None, reverse=False)
        y = shadow.outputs(inputs, chunks, states)
        if training:
            d_states, _ = shadow.states(inputs, chunks, y, None, reverse=True)
            shadow.gradients(inputs, chunks, y, states, d_states, None)
        return found

    def no_outputs(self) -> Tensor:
        """A gradient of zero for the outputs."""
        shape = (*self.batch, self.heads, self.rank, self.headdim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def chunks(self, inputs: Inputs, phase0: Tensor | None) -> tuple[Chunks, Tensor]:
        """Maps, weights and phases of all chunks, and the phase after every sequence."""
        table, sequences = self.layout.table, self.layout.sequences
        heads, size, angles, tokens = self.heads, self.tiles.chunk_size, self.angles, self.tokens
        b, c, dt, a, lam, rate = inputs[1:7]
        parts = 2 * self.rank * (heads // self.per_group)
        maps = torch.empty(tokens * parts * self.d_state, dtype=self.dtype, device=self.device)
        self.launch(
            chunk.maps_kernel, (-(-tokens // 32), parts),
            b, c, maps, *self.maps_strides, tokens, **self.copied,
        )  # fmt: skip
        weights, phase, final = self._floats(
            self.count * heads * 4 * size, self.count * heads * angles,
            self.sequences * heads * angles,
        )  # fmt: skip
        turns = torch.empty(
            self.count * heads * size * angles,
            dtype=torch.float32 if self.dtype == torch.float32 else torch.int16,
            device=self.device,
        )
        self.launch(
            chunk.weights_kernel, (self.count * heads,),
            dt, a, lam, rate, table, weights, turns, phase,
            *self.weights_strides, self.rate_stride, heads, **self.phased, Q=size, num_warps=1,
        )  # fmt: skip
        started = phase0 is not None
        self.launch(
            chunk.phase_kernel, (self.sequences * heads,),
            phase, phase0 if started else final, final, sequences, heads, variant=started,
            **self.phased, BLOCK_C=32, HAS_START=started, num_warps=4,
        )  # fmt: skip
        return Chunks(maps, weights, turns, phase), _shaped(final, self.sequences, heads, angles)

    def states(
        self, inputs: Inputs, chunks: Chunks, rows: Tensor, start: Tensor | None, reverse: bool
    ) -> tuple[States, Tensor]:
        """States before every chunk, or with `reverse` their gradients after it; and the last.

        Args:
            rows: x, or with `reverse` the gradient of the outputs.
            start: state (gradient) to start from, (sequences, H, P, N) float32; None is zeros.
                It, like what is returned, has all real parts of the pairs before the imaginary.
        """
        table, segments, sequences, _ = self.layout
        per_head, heads = self.headdim * self.d_state, self.heads
        bias = inputs.c_bias if reverse else inputs.b_bias
        inner = torch.empty(self.count * heads * per_head, dtype=self.dtype, device=self.device)
        segmented = self.segments > self.sequences
        lead, end, decay, final = self._floats(
            self.count * heads, self.segments * heads * per_head, self.segments * heads,
            self.sequences * heads * per_head if segmented else 0,
        )  # fmt: skip
        started = start is not None
        self.launch(
            scan_forward.states_kernel, (self.segments * heads, self.parts),
            rows, inputs.mimo, bias, *chunks, table, segments, start if started else end,
            inner, lead, end, decay, self.x_stride, heads, self.per_group,
            variant=(started, reverse), **self.full,
            **self._config("states of streams" if self.rank > 1 else "states"),
            HAS_START=started, REVERSE=reverse,
        )  # fmt: skip
        if segmented:
            self.launch(
                scan_forward.carry_kernel, (self.sequences * heads, -(-per_head // 512)),
                end, decay, sequences, final, heads, variant=reverse,
                SIZE=per_head, BLOCK=512, UNROLL=8, REVERSE=reverse, num_warps=4,
            )  # fmt: skip
        else:
            final = end
        final = _shaped(final, self.sequences, heads, self.headdim, self.d_state)
        return States(inner, lead, end), final

    def outputs(self, inputs: Inputs, chunks: Chunks, states: States) -> Tensor:
        """Outputs before the gate, (B, L, H, R, P) in x's dtype."""
        shape = (*self.batch, self.heads, self.rank, self.headdim)
        y = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.launch(
            scan_forward.outputs_kernel, (self.count * self.heads, self.parts),
            inputs.x, inputs.mimo, inputs.b_bias, inputs.c_bias, inputs.d, *chunks,
            self.layout.table, *states, y, self.x_stride, self.heads, self.per_group,
            **self.full, **self._config("outputs"),
        )  # fmt: skip
        return y

    def gradients(
        self, inputs: Inputs, chunks: Chunks, dy: Tensor, states: States, d_states: States,
        tail: Tensor | None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of all `inputs`, in their order; see `scan_backward`."""
        x, b, c, dt, a, lam, rate = inputs[:7]
        heads, rank, d_state, angles = self.heads, self.rank, self.d_state, self.angles
        table, count = self.layout.table, self.count
        rows, size = self.tiles.rows, self.tiles.chunk_size
        mimo = inputs.mimo_x is not None
        params = (rank * d_state, rank * d_state, 1, rank * self.headdim if mimo else 0)
        slab = min(count, max(1, SLAB_ELEMENTS // (2 * heads * rows * d_state)))
        dx, d_b, d_c, d_rate, d_dt, d_a, d_lam = (
            torch.empty(t.shape, dtype=t.dtype, device=self.device)
            for t in (x, b, c, rate, dt, a, lam)
        )
        turns, scales, plane = (slab * heads * n for n in (size * angles, size, rows * d_state))
        d_weights, border, d_params, *sums = self._floats(
            count * heads * 4 * size, count * heads * (angles + 1), count * heads * sum(params),
            turns, turns, scales, scales,
        )  # fmt: skip
        k_turning, q_turning, k_scaling, q_scaling = sums
        turned = torch.empty(2 * plane, dtype=self.dtype, device=self.device)
        ended, piece = tail is not None, min(8, rows)
        for first in reversed(range(0, count, slab)):
            programs = min(slab, count - first) * heads
            sizes = (self.x_stride, heads, self.per_group, first)
            self.launch(
                scan_backward.readouts_kernel, (programs,),
                x, dy, inputs.mimo, inputs.b_bias, inputs.c_bias, *chunks, table,
                *states, *d_states, turned[plane:], q_turning, q_scaling, border, d_params, *sizes,
                **self.full, **self._config("readouts"), PARTS=self.parts,
            )  # fmt: skip
            self.launch(
                scan_backward.inputs_kernel, (programs,),
                x, dy, inputs.mimo, inputs.b_bias, inputs.c_bias, inputs.d, *chunks, table,
                *d_states, turned, k_turning, k_scaling, dx, d_weights, d_params, *sizes,
                **self.full, **self._config("inputs"), PARTS=self.parts,
            )  # fmt: skip
            self.launch(
                scan_backward.later_kernel, (programs,),
                k_turning, q_turning, k_scaling, q_scaling, rate, chunks.weights, table, border,
                tail if ended else border, d_weights, self.rate_stride, heads, first, variant=ended,
                **self.phased, Q=size, HAS_TAIL=ended, PIECE=min(8, size), num_warps=1,
            )  # fmt: skip
            self.launch(
                scan_backward.sums_kernel,
                (programs // heads * (rows // piece), 2 * (heads // self.per_group) + 1),
                turned, k_turning, table, d_b, d_c, d_rate, heads, self.per_group, plane, first,
                **self.summed, BLOCK=piece, UNROLL=math.gcd(4, self.per_group), num_warps=1,
            )  # fmt: skip
        self.launch(
            scan_backward.weights_kernel, (count * heads,),
            d_weights, dt, a, lam, table, d_dt, d_a, d_lam, *self.weights_strides, heads,
            Q=size, num_warps=1,
        )  # fmt: skip
        d_params = _shaped(d_params, count, heads, sum(params)).sum(0)
        d_b_bias, d_c_bias, d_d, d_mimo = d_params.split(params, 1)
        shape = (heads, rank, -1)
        d_mimo = d_mimo.view(shape) if mimo else None
        d_bias = d_b_bias.view(shape), d_c_bias.view(shape)
        return [dx, d_b, d_c, d_dt, d_a, d_lam, d_rate, *d_bias, d_d.view(-1), d_mimo]

    def _config(self, kernel: str) -> dict[str, int]:
        warps, stages = config(kernel, self.device)
        return {"num_warps": warps, "num_stages": stages}

    def _floats(self, *counts: int) -> tuple[Tensor, ...]:
        """Aligned buffers of float32, cut from one allocation, which costs as much as a launch.

        Each may be a little longer than asked for.
        """
        padded = [-(-n // 16) * 16 for n in counts]
        whole = torch.empty(sum(padded), dtype=torch.float32, device=self.device)
        return whole.split_with_sizes(padded)


def _shaped(buffer: Tensor, *shape: int) -> Tensor:
    """The start of a buffer in a shape."""
    return buffer[: math.prod(shape)].view(shape)


def config(kernel: str, device: torch.device) -> tuple[int, int]:
    """Warps and stages of a kernel; one stage on Blackwell, where more gave wrong numbers."""
    warps, stages = CONFIGS[kernel]
    return warps, stages if can_pipeline(device) else 1
