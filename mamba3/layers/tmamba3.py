"""TMamba3Layer: the Mamba-3 sequence mixer, SISO and MIMO.

    code            paper / official    meaning                                  shape
    u               u                   input                                    (B, L, D)
    z, x            z, x                gate and values                          (B, L, H, P)
    b, c            B, C                input and output maps                    (B, L, R, G, N)
    dt              softplus(dd_dt + dt_bias)   step size                        (B, L, H)
    a               -f(dd_A)            decay rate                               (B, L, H)
    lam             sigmoid(trap)       weight of the current token              (B, L, H)
    rate            pi * tanh(angle)    rotation, rad per unit of dt             (B, L, S)

Source: arXiv 2603.15569. Tensor names, shapes and the order of in_proj's rows are those of the
official checkpoints.
"""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn

from ..config import Mamba3Config
from ..ops import Mamba3State, mamba3_scan, mamba3_step, rms_norm, steering
from .layout import MATRIX, VECTOR, Layout, Rows, blocks
from .mixer import Mixer
from .norm import RMSNorm


class TMamba3Layer(Mixer):
    """Mamba-3 mixer: (B, L, D) to (B, L, D), with a state that decodes one token at a time.

    Args:
        d_model: width D of input and output.
        d_state: state size N of a head, even.
        expand: inner width over d_model.
        headdim: channels P of a head; must divide expand * d_model.
        ngroups: B/C groups G; must divide the number of heads.
        is_mimo: R input and output streams a head instead of one.
        mimo_rank: R, used only when `is_mimo`.
        rope_fraction: share of the N channels that rotate.
        is_outproj_norm: RMSNorm over each head's channels before the gate.
        a_activation: "heavy_tail" or "softplus"; must be the one the weights were trained with.
        a_floor: decay rates are at most -a_floor.
        dt_min, dt_max, dt_init_floor: initial step sizes, log-uniform, at least the floor.
        angle_init_scale: factor on in_proj's initial rows for the angles.
        norm_eps: epsilon of the norms.
        chunk_size: tokens a chunk; None chooses by rank and length. Never changes the numbers.
        device, dtype: of the weights. dt_bias, D, B_bias, C_bias and mimo_* are float32 whatever
            half-precision dtype is asked for, here and in `.to()`.

    Raises:
        ValueError: sizes that do not divide one another.

    Example:
        >>> import torch
        >>> layer = TMamba3Layer(64, d_state=32, headdim=32)
        >>> u = torch.randn(2, 10, 64)
        >>> y, state = layer(u, return_state=True)
        >>> y_next, state = layer.step(torch.randn(2, 64), state)
    """

    float32_parameters = ("dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o")

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        rope_fraction: float = 0.5,
        is_outproj_norm: bool = False,
        a_activation: str = "heavy_tail",
        a_floor: float = 1e-4,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_init_floor: float = 1e-4,
        angle_init_scale: float = 1.0,
        norm_eps: float = 1e-5,
        chunk_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        # One place checks sizes and derives the others: the model's config.
        config = Mamba3Config(
            vocab_size=1,
            n_layer=1,
            d_model=d_model,
            d_state=d_state,
            expand=expand,
            headdim=headdim,
            ngroups=ngroups,
            is_mimo=is_mimo,
            mimo_rank=mimo_rank,
            rope_fraction=rope_fraction,
            is_outproj_norm=is_outproj_norm,
            a_activation=a_activation,
            a_floor=a_floor,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
            angle_init_scale=angle_init_scale,
            norm_eps=norm_eps,
        )
        self.config, self.d_model = config, d_model
        self.chunk_size = chunk_size
        heads, rank, angles = config.n_heads, config.rank, config.n_angles
        maps = rank * ngroups * d_state
        # Rows of in_proj: z, x, B with C, dd_dt, dd_A, trap, angle.
        self.in_proj_splits = (config.d_inner,) * 2 + (2 * maps,) + (heads,) * 3 + (angles,)

        weights = {"device": device, "dtype": dtype}
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        precise = {"device": device, "dtype": wide}
        self.in_proj = nn.Linear(d_model, sum(self.in_proj_splits), bias=False, **weights)
        self.dt_bias = nn.Parameter(torch.empty(heads, **precise))
        self.D = nn.Parameter(torch.empty(heads, **precise))
        self.B_bias = nn.Parameter(torch.empty(heads, rank, d_state, **precise))
        self.C_bias = nn.Parameter(torch.empty(heads, rank, d_state, **precise))
        self.B_norm = RMSNorm(d_state, eps=norm_eps, **weights)
        self.C_norm = RMSNorm(d_state, eps=norm_eps, **weights)
        if is_mimo:
            for name in ("mimo_x", "mimo_z", "mimo_o"):
                shape = (heads, rank, headdim)
                self.register_parameter(name, nn.Parameter(torch.empty(shape, **precise)))
        if is_outproj_norm:
            self.norm = RMSNorm(config.d_inner, eps=norm_eps, **weights)
        self.out_proj = nn.Linear(config.d_inner, d_model, bias=False, **weights)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Mamba3Config, *, device=None, dtype=None) -> TMamba3Layer:
        """The mixer of a model with this config."""
        options = inspect.signature(cls).parameters.keys() - {"chunk_size", "device", "dtype"}
        return cls(**{name: getattr(config, name) for name in options}, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every parameter; call it after materialising a layer built on meta.

        | tensor | distribution |
        |---|---|
        | in_proj, out_proj | kaiming-uniform, bound 1/sqrt(fan_in) |
        | angle rows of in_proj | the same, times angle_init_scale |
        | dt_bias | softplus(dt_bias) log-uniform in [dt_min, dt_max], at least dt_init_floor |
        | D, B_bias, C_bias, norms, mimo_z | 1 |
        | mimo_x, mimo_o | 1/R |

        A model divides out_proj further, by its depth. On meta nothing happens.
        """
        if self.D.is_meta:
            return
        config = self.config
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        angle_rows = self.in_proj.weight[self.in_proj.out_features - config.n_angles :]
        angle_rows.mul_(config.angle_init_scale)
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp_()
        dt.clamp_(min=config.dt_init_floor)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        for one in (self.D, self.B_bias, self.C_bias):
            nn.init.ones_(one)
        for norm in (self.B_norm, self.C_norm, *([self.norm] if config.is_outproj_norm else [])):
            norm.reset_parameters()
        if config.is_mimo:
            nn.init.constant_(self.mimo_x, 1 / config.rank)
            nn.init.ones_(self.mimo_z)
            nn.init.constant_(self.mimo_o, 1 / config.rank)

    def parameter_layout(self) -> Layout:
        """Rows of the projections that are matrices of their own, for optimizers.

        The rows of dd_dt, dd_A and trap are a scalar a head; they are no part of a matrix.
        """
        inner, _, maps, heads, _, _, angles = self.in_proj_splits
        scalars = (Rows(name, heads, decay=True) for name in ("dd_dt", "dd_A", "trap"))
        matrices = blocks(z=inner, x=inner, B=maps // 2, C=maps // 2)
        layout = {"in_proj.weight": (*matrices, *scalars, *blocks(angle=angles))}
        small = {name: VECTOR for name in self.float32_parameters if hasattr(self, name)}
        return {**layout, **small, "out_proj.weight": MATRIX}

    def _mix(self, u, state, cu_seqlens, return_state):
        tensors, options = self._project(u)
        y, state = mamba3_scan(
            *tensors,
            **options,
            state=state,
            cu_seqlens=cu_seqlens,
            chunk_size=self.chunk_size,
            return_state=return_state,
        )
        return y.flatten(-2), state

    def _mix_token(self, u, state, inplace):
        tensors, options = self._project(u)
        y, state = mamba3_step(*tensors, **options, state=state, inplace=inplace)
        return y.flatten(-2), state

    def new_state(self, batch: int) -> Mamba3State:
        """The state of `batch` sequences before their first token."""
        config = self.config
        return Mamba3State.zeros(
            batch,
            heads=config.n_heads,
            headdim=config.headdim,
            d_state=config.d_state,
            rank=config.rank,
            angles=config.n_angles,
            device=self.D.device,
            dtype=self.D.dtype,
        )

    def _project(self, u: Tensor) -> tuple[list[Tensor], dict]:
        """From (..., D) to the arguments of the scan and the step."""
        config = self.config
        sizes = (*self.in_proj_splits[:3], sum(self.in_proj_splits[3:]))
        z, x, maps, raw = self.in_proj(u).split(sizes, dim=-1)
        z, x = (t.unflatten(-1, (config.n_heads, config.headdim)) for t in (z, x))
        maps = maps.unflatten(-1, (2, config.rank, config.ngroups, config.d_state))
        # B_norm and C_norm at once; decoding is bound by the number of operations.
        wide = self.dt_bias.dtype
        norms = torch.stack((self.B_norm.weight, self.C_norm.weight)).to(wide)
        b, c = rms_norm(maps, norms[:, None, None], config.norm_eps, dtype=maps.dtype).unbind(-4)
        steered = steering(raw, self.dt_bias, config.a_activation, config.a_floor)
        options = {
            "mimo": (self.mimo_x, self.mimo_z, self.mimo_o) if config.is_mimo else None,
            "norm_weight": self.norm.weight.view(config.n_heads, config.headdim)
            if config.is_outproj_norm
            else None,
            "norm_eps": config.norm_eps,
        }
        return [x, b, c, *steered, self.B_bias, self.C_bias, self.D, z], options
