"""Launchers of the scan's kernels: layouts, tile sizes, buffers; formulas are with the kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import chunk, scan_backward, scan_forward
from .launch import Launcher, stride_unit

# Walks per multiprocessor that a scan is cut into, as many as run at a time.
PROGRAMS_PER_SM = 2
# Warps and pipeline stages of a kernel, measured on Hopper. There is no search at run time: a first
# call compiles one configuration, and two processes always run the same one.
CONFIGS = {
    "states": (4, 2),
    "outputs": (4, 1),
    "inputs": (4, 1),
    "readouts": (4, 1),
    "turn_back": (1, 1),
}
# Rows that `turn_back_kernel` takes at a time.
PIECE = 8
# Elements of dk and dq that exist at a time; 128 MB.
SLAB_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernels' tiles, by the widths and the dtype alone."""

    rows: int
    br: int
    block_p: int
    half: int
    angles: int
    still: int

    @classmethod
    def of(cls, rank, headdim, d_state, angles, dtype, chunk_size) -> Tiles:
        half = max(16, triton.next_power_of_2(d_state // 2))
        br = triton.next_power_of_2(rank)
        # Tiles of float32 are twice as large in shared memory, as are those of a wide state.
        narrow = dtype == torch.float32 or half > 64
        rows = max(32 if narrow else 64, br)
        if chunk_size is not None:
            rows = min(rows, max(16, br * triton.next_power_of_2(chunk_size)))
        block_p = min(32 if narrow else 64, max(16, triton.next_power_of_2(headdim)))
        pairs = (triton.next_power_of_2(max(1, n)) for n in (angles, d_state // 2 - angles))
        return cls(rows, br, block_p, half, *pairs)

    @property
    def chunk_size(self) -> int:
        return self.rows // self.br


class Layout(NamedTuple):
    """Where chunks and segments of chunks lie; see the legend of `chunk`."""

    table: Tensor
    segments: Tensor
    sequences: Tensor

    @property
    def segmented(self) -> bool:
        """Whether some sequence has more than one segment."""
        return len(self.segments) > len(self.sequences)


@functools.lru_cache(maxsize=64)
def layout(bounds: Sequence[int], size: int, per_sequence: int, device: torch.device) -> Layout:
    """Lay sequences out in chunks of `size` tokens and about `per_sequence` segments each.

    Kept, since it is read back to back by all layers of a model and all steps of a training run.
    """
    starts = torch.tensor(list(bounds))
    counts = -(-starts.diff() // size)
    first = counts.cumsum(0) - counts
    per_segment = max(1, -(-int(counts.max()) // per_sequence))
    segment_counts = (-(-counts // per_segment)).clamp(min=1)
    segment_first = segment_counts.cumsum(0) - segment_counts
    numbers = torch.arange(len(counts))

    of = numbers.repeat_interleave(segment_counts)
    within = torch.arange(len(of)) - segment_first[of]
    begin = first[of] + within * per_segment
    end = torch.minimum(begin + per_segment, (first + counts)[of])
    opens, closes = within == 0, within == segment_counts[of] - 1
    segments = torch.stack((begin, end, of, opens.long(), closes.long()), 1)

    of = numbers.repeat_interleave(counts)
    within = torch.arange(len(of)) - first[of]
    segment = segment_first[of] + within // per_segment
    begin = starts[of] + within * size
    columns = (begin, starts[of + 1], segment, of, opens[segment].long(), closes[segment].long())
    table = torch.stack(columns, 1)
    sequences = (first, first + counts, segment_first, segment_first + segment_counts)
    return Layout(*(t.to(device) for t in (table, segments, torch.stack(sequences, 1))))


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
    """Tensor arguments of a scan, tokens flattened: see `mamba3.ops.mamba3_scan`."""

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

    def __init__(self, inputs: Inputs, bounds: Sequence[int], chunk_size: int | None):
        x, mimo = inputs.x, inputs.mimo_x is not None
        self.tokens, self.heads, headdim = x.shape
        _, rank, groups, d_state = inputs.b.shape
        angles = inputs.rate.shape[1]
        self.device, self.sequences = x.device, len(bounds) - 1
        self.per_group = self.heads // groups
        self.tiles = tiles = Tiles.of(rank, headdim, d_state, angles, x.dtype, chunk_size)
        self.parts = triton.cdiv(headdim, tiles.block_p)
        self.wanted = PROGRAMS_PER_SM * _multiprocessors(x.device)
        walks = self.sequences * self.heads * self.parts
        per_sequence = max(1, self.wanted // walks)
        self.layout = layout(bounds, tiles.chunk_size, per_sequence, x.device)
        self.chunks_count = len(self.layout.table)

        native = x.is_cuda and torch.version.hip is None and not triton.knobs.runtime.interpret
        unit = stride_unit(x.stride(0))
        self.x_stride = x.stride(0) // unit
        self.maps_sizes = {"R": rank, "G": groups, "N": d_state, "HALF": tiles.half, "MIMO": mimo}
        self.rows = self.maps_sizes | {"S": angles, "ROWS": tiles.rows, "BR": tiles.br}
        self.turned = self.rows | {"P": headdim, "FAST": native, "PIECE": max(PIECE, tiles.br)}
        self.turned |= {"BLOCK_S": tiles.angles, "STILL": tiles.still}
        del self.turned["HALF"]
        self.full = self.rows | {"P": headdim, "BLOCK_P": tiles.block_p, "UNIT": unit}
        self.full |= {"FAST": native, "PRECISION": "tf32x3" if native else "ieee"}
        present = [t for t in inputs if t is not None]
        facts = [(t.dtype, t.data_ptr() % 16, t.stride(0)) for t in present]
        self.launch = Launcher((x.device, self.heads, headdim, groups, tiles, *facts))

    def chunks(self, inputs: Inputs, phase0: Tensor | None) -> tuple[Chunks, Tensor]:
        """Maps, weights and phases of all chunks, and the phase after every sequence."""
        table, _, sequences = self.layout
        heads, size, angles = self.heads, self.tiles.chunk_size, self.rows["S"]
        b, c, dt, a, lam, rate = inputs[1:7]
        _, rank, groups, d_state = b.shape
        maps = inputs.x.new_empty(self.tokens, 2, rank, groups, d_state)
        unit = stride_unit(b.stride(0), c.stride(0))
        self.launch(
            chunk.maps_kernel, (triton.cdiv(self.tokens, 32), 2 * rank * groups),
            b, c, maps, b.stride(0) // unit, c.stride(0) // unit, self.tokens,
            **self.maps_sizes, UNIT=unit, BLOCK=32, num_warps=4,
        )  # fmt: skip
        count = self.chunks_count
        weights, phase, final = self._floats(
            count * heads * 4 * size, count * heads * angles, self.sequences * heads * angles
        )
        turns = torch.empty(
            count * heads * size * angles,
            dtype=torch.float32 if inputs.x.dtype == torch.float32 else torch.int16,
            device=self.device,
        )
        self.launch(
            chunk.weights_kernel, (self.chunks_count * heads,),
            dt, a, lam, rate, table, weights, turns, phase,
            dt.stride(0), a.stride(0), lam.stride(0), rate.stride(0), heads,
            S=angles, Q=size, BLOCK_S=self.tiles.angles, num_warps=1,
        )  # fmt: skip
        self.launch(
            chunk.phase_kernel, (self.sequences * heads,),
            phase, final if phase0 is None else phase0, final, sequences, heads,
            S=angles, BLOCK_S=self.tiles.angles, BLOCK_C=32, HAS_START=phase0 is not None,
            num_warps=4,
        )  # fmt: skip
        return Chunks(maps, weights, turns, phase), final.view(self.sequences, heads, angles)

    def states(
        self, inputs: Inputs, chunks: Chunks, rows: Tensor, start: Tensor | None, reverse: bool
    ) -> tuple[States, Tensor]:
        """States before every chunk, or with `reverse` their gradients after it; and the last.

        Args:
            rows: x, or with `reverse` the gradient of the outputs.
            start: state (gradient) to start from, (sequences, H, P, N) float32; None is zeros.
                It, like what is returned, has all real parts of the pairs before the imaginary.
        """
        table, segments, sequences = self.layout
        heads, sizes = self.heads, (inputs.x.shape[2], inputs.b.shape[3])
        bias = inputs.c_bias if reverse else inputs.b_bias
        size = heads * sizes[0] * sizes[1]
        inner = inputs.x.new_empty(self.chunks_count * size)
        lead, end, decay, final = self._floats(
            self.chunks_count * heads, len(segments) * size, len(segments) * heads,
            self.sequences * size if self.layout.segmented else 0,
        )  # fmt: skip
        self.launch(
            scan_forward.states_kernel, (len(segments) * heads, self.parts),
            rows, inputs.mimo, bias, *chunks, table, segments, end if start is None else start,
            inner, lead, end, decay, self.x_stride, heads, self.per_group,
            **self.full, **_config("states"), HAS_START=start is not None, REVERSE=reverse,
        )  # fmt: skip
        if self.layout.segmented:
            per_head = sizes[0] * sizes[1]
            self.launch(
                scan_forward.carry_kernel, (self.sequences * heads, triton.cdiv(per_head, 512)),
                end, decay, sequences, final, heads,
                SIZE=per_head, BLOCK=512, UNROLL=8, REVERSE=reverse, num_warps=4,
            )  # fmt: skip
        else:
            final = end
        return States(inner, lead, end), final.view(self.sequences, heads, *sizes)

    def outputs(self, inputs: Inputs, chunks: Chunks, states: States) -> Tensor:
        """Outputs before the gate, (T, H, R, P) in x's dtype."""
        x = inputs.x
        y = x.new_empty(self.tokens, self.heads, inputs.b.shape[1], x.shape[2])
        self.launch(
            scan_forward.outputs_kernel, (self.chunks_count * self.heads, self.parts),
            x, inputs.mimo, inputs.b_bias, inputs.c_bias, inputs.d, *chunks, self.layout.table,
            *states, y, self.x_stride, self.heads, self.per_group,
            **self.full, **_config("outputs"),
        )  # fmt: skip
        return y

    def gradients(
        self, inputs: Inputs, chunks: Chunks, dy: Tensor, states: States, d_states: States,
        tail: Tensor | None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of all `inputs`, in their order; see `scan_backward`."""
        x, b, c, dt, a, lam, rate = inputs[:7]
        heads, table = self.heads, self.layout.table
        rank, groups, d_state = b.shape[1:]
        angles, rows, size = rate.shape[1], self.tiles.rows, self.tiles.chunk_size
        count, mimo = self.chunks_count, inputs.mimo_x is not None
        params = (rank * d_state, rank * d_state, 1, rank * x.shape[2] if mimo else 0)
        slab = min(count, max(1, SLAB_ELEMENTS // (2 * heads * rows * d_state)))
        dx = x.new_empty(x.shape)
        d_b, d_c, d_rate, d_dt, d_a, d_lam = (
            t.new_empty(t.shape) for t in (b, c, rate, dt, a, lam)
        )
        d_weights, border, d_params, d_rates, turned = self._floats(
            count * heads * 4 * size, count * heads * (angles + 1), count * heads * sum(params),
            slab * heads * size * angles, 2 * slab * heads * rows * d_state,
        )  # fmt: skip
        plane, piece = len(turned) // 2, min(8, rows)
        common = (x, dy, inputs.mimo, inputs.b_bias)
        for first in reversed(range(0, count, slab)):
            programs = min(slab, count - first) * heads
            sizes = (self.x_stride, heads, self.per_group, first)
            self.launch(
                scan_backward.readouts_kernel, (programs,),
                *common, *chunks, table, *states, *d_states,
                turned[plane:], border, d_params, *sizes,
                **self.full, **_config("readouts"), PARTS=self.parts,
            )  # fmt: skip
            self.launch(
                scan_backward.inputs_kernel, (programs,),
                *common, inputs.c_bias, inputs.d, *chunks, table, *d_states,
                turned, dx, d_weights, d_params, *sizes,
                **self.full, **_config("inputs"), PARTS=self.parts,
            )  # fmt: skip
            self.launch(
                scan_backward.turn_back_kernel, (programs,),
                turned, rate, inputs.b_bias, inputs.c_bias, *chunks, table, border,
                border if tail is None else tail, d_rates, d_weights, d_params,
                rate.stride(0), heads, self.per_group, plane, first,
                **self.turned, **_config("turn_back"), HAS_TAIL=tail is not None,
            )  # fmt: skip
            self.launch(
                scan_backward.sums_kernel,
                (programs // heads * (rows // piece), 2 * groups + 1),
                turned, d_rates, table, d_b, d_c, d_rate, heads, self.per_group, plane, first,
                **self.rows, BLOCK=piece, UNROLL=math.gcd(4, self.per_group), num_warps=1,
            )  # fmt: skip
        self.launch(
            scan_backward.weights_kernel, (count * heads,),
            d_weights, dt, a, lam, table, d_dt, d_a, d_lam,
            dt.stride(0), a.stride(0), lam.stride(0), heads, Q=size, num_warps=1,
        )  # fmt: skip
        d_params = d_params.view(count, heads, -1).sum(0)
        d_b_bias, d_c_bias, d_d, d_mimo = d_params.split(params, 1)
        shape = (heads, rank, -1)
        d_mimo = d_mimo.view(shape) if mimo else None
        d_bias = d_b_bias.view(shape), d_c_bias.view(shape)
        return [dx, d_b, d_c, d_dt, d_a, d_lam, d_rate, *d_bias, d_d.view(-1), d_mimo]

    def _floats(self, *counts: int) -> tuple[Tensor, ...]:
        """Aligned buffers of float32, cut from one allocation, which costs as much as a launch."""
        padded = [-(-n // 16) * 16 for n in counts]
        buffers = torch.empty(sum(padded), dtype=torch.float32, device=self.device).split(padded)
        return tuple(t[:n] if n < len(t) else t for t, n in zip(buffers, counts, strict=True))


def _config(kernel: str) -> dict[str, int]:
    warps, stages, *more = CONFIGS[kernel]
    return {"num_warps": warps, "num_stages": stages, **({"maxnreg": more[0]} if more else {})}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
