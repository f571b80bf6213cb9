"""TMambaLayer: the Mamba-1 sequence mixer, for the checkpoints that exist.

    code             paper / official    meaning                             shape
    u                u                   input                               (B, L, d_model)
    x, z             x, z                values and gate                     (B, L, D)
    low              dt                  step size before its projection     (B, L, R)
    dt               delta               step size                           (B, L, D)
    a                A                   decay rate                          (D, N)
    b, c             B, C                input and output maps               (B, L, N)

Source: arXiv 2312.00752, figure 3 and section 3.4. Tensor names, shapes and initialisation are
those of the official code (mamba_ssm.Mamba).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Mamba3Config, MambaSizes
from ..ops import causal_conv, causal_conv_step, selective_scan, selective_step
from .layout import MATRIX, VECTOR, Layout, blocks
from .mixer import Mixer


class MambaState(NamedTuple):
    """Decoding state of one layer for a batch of sequences; float32 whatever the weights are.

    Fields:
        conv: the last tokens that the convolution sees again, oldest first, (B, D, d_conv - 1).
        h: state of the recurrence, (B, D, N).
    """

    conv: Tensor
    h: Tensor

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.h.shape[0]

    def reorder(self, index: Tensor) -> MambaState:
        """Pick sequences by number, repeats allowed, as beam search does; index is (B',) int."""
        return MambaState(*(t.index_select(0, index) for t in self))


class TMambaLayer(Mixer):
    """Mamba-1 mixer: (B, L, d_model) to the same, with a state that decodes one token at a time.

    Args:
        d_model: width of input and output.
        d_state: state size N of a channel.
        d_conv: tokens that the convolution sees.
        expand: inner width D over d_model.
        dt_rank: rank R of the step size's projection; None is d_model / 16, rounded up.
        bias, conv_bias: whether the projections and the convolution have one.
        dt_min, dt_max, dt_init_floor: initial step sizes, log-uniform, at least the floor.
        dt_scale: factor on the bound of dt_proj's initial weights, R ** -0.5.
        maps_norm_eps: epsilon of an RMSNorm without weights over the step size before its
            projection, B and C, as Falcon-Mamba has them; None is none.
        device, dtype: of the weights. A_log and D are float32 whatever half-precision dtype is
            asked for, here and in `.to()`.

    Example:
        >>> import torch
        >>> layer = TMambaLayer(32)
        >>> y, state = layer(torch.randn(2, 10, 32), return_state=True)
        >>> y_next, state = layer.step(torch.randn(2, 32), state)
    """

    float32_parameters = ("A_log", "D")

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_init_floor: float = 1e-4,
        dt_scale: float = 1.0,
        maps_norm_eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if d_model < 1:
            raise ValueError(f"d_model must be more than 0, got {d_model}")
        # One place checks the other sizes: the model's config.
        self.sizes = sizes = MambaSizes(
            d_state=d_state,
            d_conv=d_conv,
            expand=expand,
            dt_rank=dt_rank,
            bias=bias,
            conv_bias=conv_bias,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
            dt_scale=dt_scale,
            maps_norm_eps=maps_norm_eps,
        )
        self.d_model, self.d_inner = d_model, expand * d_model
        self.dt_rank, inner = sizes.rank(d_model), self.d_inner
        weights = {"device": device, "dtype": dtype}
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        precise = {"device": device, "dtype": wide}
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias, **weights)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, bias=conv_bias, **weights)
        self.x_proj = nn.Linear(inner, self.dt_rank + 2 * d_state, bias=False, **weights)
        self.dt_proj = nn.Linear(self.dt_rank, inner, **weights)
        self.A_log = nn.Parameter(torch.empty(inner, d_state, **precise))
        self.D = nn.Parameter(torch.empty(inner, **precise))
        self.out_proj = nn.Linear(inner, d_model, bias=bias, **weights)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Mamba3Config, *, device=None, dtype=None) -> TMambaLayer:
        """The mixer of a model with this config."""
        sizes = dataclasses.asdict(config.mamba)
        return cls(config.d_model, **sizes, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every parameter; call it after materialising a layer built on meta.

        | tensor | distribution |
        |---|---|
        | in_proj, x_proj, out_proj, conv1d | kaiming-uniform, bound 1/sqrt(fan_in) |
        | dt_proj.weight | uniform, bound dt_scale / sqrt(R) |
        | dt_proj.bias | softplus of it log-uniform in [dt_min, dt_max], at least dt_init_floor |
        | A_log | log(1 .. N) in every channel |
        | D | 1 |

        On meta nothing happens.
        """
        if self.D.is_meta:
            return
        sizes = self.sizes
        for module in (self.in_proj, self.conv1d, self.x_proj, self.out_proj):
            module.reset_parameters()
        bound = sizes.dt_scale * self.dt_rank**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        bias, low, high = self.dt_proj.bias, math.log(sizes.dt_min), math.log(sizes.dt_max)
        dt = torch.empty_like(bias, dtype=torch.float32).uniform_(low, high)
        dt = dt.exp_().clamp_(min=sizes.dt_init_floor)
        bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.A_log.copy_(torch.arange(1, sizes.d_state + 1, device=self.A_log.device).log())
        nn.init.ones_(self.D)

    def parameter_layout(self) -> Layout:
        """Rows of the projections that are matrices of their own, for optimizers.

        A_log, D, biases and the convolution, four numbers a channel, take no weight decay.
        """
        maps = blocks(low=self.dt_rank, B=self.sizes.d_state, C=self.sizes.d_state)
        layout = {"in_proj.weight": blocks(x=self.d_inner, z=self.d_inner), "x_proj.weight": maps}
        layout |= {"dt_proj.weight": MATRIX, "out_proj.weight": MATRIX}
        small = ("A_log", "D", "conv1d.weight", "conv1d.bias", "dt_proj.bias")
        small += ("in_proj.bias", "out_proj.bias")
        names = dict(self.named_parameters())
        return layout | {name: VECTOR for name in small if name in names}

    def _mix(self, u, state, cu_seqlens, return_state):
        conv, h = None, None
        if state is not None:
            self._check_state(state, u.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1)
            conv, h = state
        x, z = self.in_proj(u).chunk(2, -1)
        x, conv = causal_conv(x, *self._kernel(), state=conv, cu_seqlens=cu_seqlens)
        arguments = self._arguments(x)
        y, h = selective_scan(x, *arguments, z, softplus=True, h=h, cu_seqlens=cu_seqlens)
        return y, MambaState(conv, h)

    def _mix_token(self, u, state, inplace):
        self._check_state(state, u.shape[0])
        x, z = self.in_proj(u).chunk(2, -1)
        x, conv = causal_conv_step(x, *self._kernel(), state.conv, inplace=inplace)
        arguments = self._arguments(x)
        y, h = selective_step(x, *arguments, z, softplus=True, h=state.h, inplace=inplace)
        return y, MambaState(conv, h)

    def new_state(self, batch: int) -> MambaState:
        """The state of `batch` sequences before their first token."""
        where = {"device": self.D.device, "dtype": self.D.dtype}
        return MambaState(*(torch.zeros(batch, *shape, **where) for shape in self._state_shapes()))

    def _state_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Those of a state's tensors for one sequence."""
        sizes = self.sizes
        return (self.d_inner, sizes.d_conv - 1), (self.d_inner, sizes.d_state)

    def _check_state(self, state: MambaState, sequences: int) -> None:
        if not isinstance(state, MambaState):
            raise TypeError(f"expected a MambaState of this layer, got a {type(state).__name__}")
        if state.batch_size != sequences:
            raise ValueError(
                f"the state holds {state.batch_size} sequences, the input {sequences}: pass the "
                "state returned for this batch, or pick its rows with state.reorder(index)"
            )
        for name, got, wanted in zip(state._fields, state, self._state_shapes(), strict=True):
            if got.shape != (sequences, *wanted):
                raise ValueError(
                    f"state.{name} has shape {tuple(got.shape)}, expected {(sequences, *wanted)}: "
                    "this state belongs to a layer of other sizes"
                )

    def _kernel(self) -> tuple[Tensor, Tensor | None]:
        return self.conv1d.weight.squeeze(1), self.conv1d.bias

    def _arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        """From the convolved values: dt before its softplus, a, b, c and d of the scan."""
        sizes = self.sizes
        maps = self.x_proj(x).split((self.dt_rank, sizes.d_state, sizes.d_state), -1)
        if sizes.maps_norm_eps is not None:
            maps = (F.rms_norm(t, t.shape[-1:], eps=sizes.maps_norm_eps) for t in maps)
        low, b, c = maps
        return self.dt_proj(low), -torch.exp(self.A_log), b, c, self.D
