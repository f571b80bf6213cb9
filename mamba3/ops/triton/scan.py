"""Launchers of the scan's kernels: layouts, tile sizes, buffers; formulas are with the kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import chunk, scan_backward, scan_forward

# Programs per multiprocessor that a launch aims at, so that all of them have work.
PROGRAMS_PER_SM = 4


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
        half = max(16, triton.next_power_of_2(d_state // 2))
        br = triton.next_power_of_2(rank)
        # Tiles of float32 are twice as large in shared memory, as are those of a wide state.
        narrow = dtype == torch.float32 or half > 64
        rows = max(32 if narrow else 64, br)
        if chunk_size is not None:
            rows = min(rows, max(16, br * triton.next_power_of_2(chunk_size)))
        block_p = min(32 if narrow else 64, max(16, triton.next_power_of_2(headdim)))
        return cls(rows, br, block_p, half, max(1, triton.next_power_of_2(angles)))

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
    """Weights (K, H, 4, Q) of the chunks' tokens and phases (K, H, S) before the chunks."""

    weights: Tensor
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
    def sizes(self) -> dict[str, int]:
        """The kernels' compile-time sizes."""
        _, rank, groups, d_state = self.b.shape
        sizes = {"R": rank, "G": groups, "P": self.x.shape[2], "N": d_state}
        return sizes | {"S": self.rate.shape[1]}

    @property
    def per_group(self) -> int:
        return self.x.shape[1] // self.b.shape[2]


class Scan:
    """One scan's launches; holds sizes only, tensors are passed."""

    def __init__(self, inputs: Inputs, bounds: Sequence[int], chunk_size: int | None):
        x = inputs.x
        self.heads, self.bounds, self.device = x.shape[1], bounds, x.device
        sizes = inputs.sizes
        tiles = Tiles.of(sizes["R"], sizes["P"], sizes["N"], sizes["S"], x.dtype, chunk_size)
        self.tiles, self.sizes = tiles, sizes
        real_gpu = x.is_cuda and not _interpreted()
        self.how = {
            "MIMO": inputs.mimo_x is not None,
            "FAST": real_gpu and torch.version.hip is None,
            "PRECISION": "tf32x3" if real_gpu and torch.version.hip is None else "ieee",
        }
        self.shape = {
            "ROWS": tiles.rows, "BR": tiles.br, "BLOCK_P": tiles.block_p, "HALF": tiles.half
        }  # fmt: skip
        self.parts = triton.cdiv(sizes["P"], tiles.block_p)
        self.wanted = PROGRAMS_PER_SM * _multiprocessors(x.device)
        walks = (len(bounds) - 1) * self.heads * self.parts
        per_sequence = max(1, -(-self.wanted // walks))
        self.layout = layout(bounds, tiles.chunk_size, per_sequence, x.device)

    def on_device(self):
        """Context in which launches go to the tensors' device."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def chunks(self, inputs: Inputs, phase0: Tensor | None) -> tuple[Chunks, Tensor]:
        """Weights and phases of all chunks, and the phase after every sequence."""
        table, _, sequences = self.layout
        count, heads, angles = len(table), self.heads, inputs.rate.shape[1]
        weights = self._empty(count, heads, 4, self.tiles.chunk_size)
        phase = self._empty(count, heads, angles)
        final = self._empty(len(sequences), heads, angles)
        dt, a, lam, rate = inputs[3:7]
        if count:
            chunk.weights_kernel[(count * heads,)](
                dt, a, lam, rate, table, weights, phase,
                dt.stride(0), a.stride(0), lam.stride(0), rate.stride(0), heads,
                S=angles, Q=self.tiles.chunk_size, BLOCK_S=self.tiles.angles, num_warps=1,
            )  # fmt: skip
        chunk.phase_kernel[(len(sequences) * heads,)](
            phase, final if phase0 is None else phase0, final, sequences, heads,
            S=angles, BLOCK_S=self.tiles.angles, BLOCK_C=32, HAS_START=phase0 is not None,
            num_warps=4,
        )  # fmt: skip
        return Chunks(weights, phase), final

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
        heads, headdim, d_state = self.heads, self.sizes["P"], self.sizes["N"]
        maps, bias = (inputs.c, inputs.c_bias) if reverse else (inputs.b, inputs.b_bias)
        inner = self._empty(len(table), heads, headdim, d_state, dtype=inputs.x.dtype)
        lead = self._empty(len(table), heads)
        end = self._empty(len(segments), heads, headdim, d_state)
        decay = self._empty(len(segments), heads)
        scan_forward.states_kernel[(len(segments) * heads, self.parts)](
            rows, bias if inputs.mimo_x is None else inputs.mimo_x, maps, bias, inputs.rate,
            chunks.weights, chunks.phase, table, segments, end if start is None else start,
            inner, lead, end, decay,
            rows.stride(0), maps.stride(0), inputs.rate.stride(0), heads, inputs.per_group,
            **self.sizes, **self.shape, **self.how,
            HAS_START=start is not None, REVERSE=reverse, num_warps=4, num_stages=1,
        )  # fmt: skip
        if not self.layout.segmented:
            return States(inner, lead, end), end
        final = self._empty(len(sequences), heads, headdim, d_state)
        scan_forward.carry_kernel[(len(sequences) * heads, triton.cdiv(headdim * d_state, 1024))](
            end, decay, sequences, final, heads,
            SIZE=headdim * d_state, BLOCK=1024, REVERSE=reverse, num_warps=4,
        )  # fmt: skip
        return States(inner, lead, end), final

    def outputs(self, inputs: Inputs, chunks: Chunks, states: States) -> Tensor:
        """Outputs before the gate, (T, H, R, P) in x's dtype."""
        x, b, c, rate = inputs.x, inputs.b, inputs.c, inputs.rate
        y = x.new_empty(len(x), self.heads, self.sizes["R"], self.sizes["P"])
        scan_forward.outputs_kernel[(len(self.layout.table) * self.heads, self.parts)](
            x, inputs.d if inputs.mimo_x is None else inputs.mimo_x, b, c, inputs.b_bias,
            inputs.c_bias, rate, inputs.d, chunks.weights, chunks.phase, self.layout.table,
            *states, y,
            x.stride(0), b.stride(0), c.stride(0), rate.stride(0), self.heads, inputs.per_group,
            **self.sizes, **self.shape, **self.how, num_warps=4, num_stages=1,
        )  # fmt: skip
        return y

    def gradients(
        self, inputs: Inputs, chunks: Chunks, dy: Tensor, states: States, d_states: States,
        tail: Tensor | None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of all `inputs`, in their order; see `scan_backward`."""
        x, b, c, dt, a, lam, rate = inputs[:7]
        tokens, heads, headdim = x.shape
        _, rank, groups, d_state = b.shape
        count, per_program = len(self.layout.table), self._heads_per_program(inputs.per_group)
        each, width = rank * d_state, 2 * rank * d_state + rate.shape[1]
        dx = self._empty(tokens, heads, headdim, dtype=x.dtype)
        d_maps = self._empty(heads // per_program, tokens, width)
        d_weights = self._empty(count, heads, 4, self.tiles.chunk_size)
        mimo = 0 if inputs.mimo_x is None else rank * headdim
        d_params = self._empty(count, heads, 2 * each + 1 + mimo)
        grid = (count * heads // per_program,)
        rows = (x, dy, inputs.d if inputs.mimo_x is None else inputs.mimo_x)
        maps = (b, c, inputs.b_bias, inputs.c_bias, rate)
        sums = (d_maps, d_weights, d_params)
        strides = (x.stride(0), b.stride(0), c.stride(0), rate.stride(0))
        strides += (heads, inputs.per_group, per_program, tokens)
        how = self.sizes | self.shape | self.how | {"PARTS": self.parts, "num_stages": 1}
        scan_backward.inputs_kernel[grid](
            *rows, *maps, inputs.d, *chunks, self.layout.table, *d_states, dx, *sums,
            *strides, **how, num_warps=8,
        )  # fmt: skip
        scan_backward.readouts_kernel[grid](
            *rows, *maps, *chunks, self.layout.table, *states, *d_states,
            chunks.phase if tail is None else tail, *sums,
            *strides, **how, HAS_TAIL=tail is not None, num_warps=8,
        )  # fmt: skip
        d_dt, d_a, d_lam = (self._empty(tokens, heads) for _ in range(3))
        scan_backward.weights_gradients_kernel[(count * heads,)](
            d_weights, dt, a, lam, self.layout.table, d_dt, d_a, d_lam,
            dt.stride(0), a.stride(0), lam.stride(0), heads,
            Q=self.tiles.chunk_size, num_warps=1,
        )  # fmt: skip

        d_maps = d_maps.unflatten(0, (groups, -1))
        d_maps = d_maps.squeeze(1) if d_maps.shape[1] == 1 else d_maps.sum(1)
        d_rate = d_maps[..., 2 * each :]
        d_rate = d_rate[0] if groups == 1 else d_rate.sum(0)
        d_b, d_c = (
            d_maps[..., i * each : (i + 1) * each].unflatten(2, (rank, d_state)).permute(1, 2, 0, 3)
            for i in range(2)
        )
        d_b_bias, d_c_bias, d_d, d_mimo = d_params.sum(0).split((each, each, 1, mimo), 1)
        grads = [dx, d_b, d_c, d_dt, d_a, d_lam, d_rate]
        grads += [d_b_bias.view(heads, rank, d_state), d_c_bias.view(heads, rank, d_state)]
        grads += [d_d.view(heads)]
        return [*grads, d_mimo.view(heads, rank, headdim) if mimo else None]

    def _heads_per_program(self, per_group: int) -> int:
        """Most heads that share a program and leave enough programs to fill the chip."""
        most = max(1, len(self.layout.table) * self.heads // self.wanted)
        return max(n for n in range(1, per_group + 1) if per_group % n == 0 and n <= most)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _interpreted() -> bool:
    return triton.knobs.runtime.interpret
