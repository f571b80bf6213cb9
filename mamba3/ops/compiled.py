"""What torch.compile sees of the scans, the step and the loss: opaque ops of `torch.library`.

Their eager forms loop over chunks, launch kernels or read the values of cu_seqlens, none of which
can be traced. The body of an op is the public function itself, so it checks its arguments and
chooses its backend when the compiled code runs. Ops made of a few products are traced as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .reference import Mimo
from .state import Mamba3State

_TENSORS = (
    "Tensor x, Tensor b, Tensor c, Tensor dt, Tensor a, Tensor lam, Tensor rate, Tensor b_bias, "
    "Tensor c_bias, Tensor d, Tensor? z, Tensor? mimo_x, Tensor? mimo_z, Tensor? mimo_o, "
    "Tensor? norm_weight"
)
_SCAN = (
    f"{_TENSORS}, Tensor? h, Tensor? phase, Tensor? k, Tensor? x_prev, Tensor? cu_seqlens, "
    "float norm_eps, int? chunk_size, bool return_state"
)
_STEP = f"{_TENSORS}, Tensor h, Tensor phase, Tensor k, Tensor x_prev, float norm_eps"
_STEP_INPLACE = (
    f"{_TENSORS}, Tensor(a!) h, Tensor(b!) phase, Tensor(c!) k, Tensor(d!) x_prev, "
    "Tensor? state_indices, float norm_eps"
)
_SELECTIVE = (
    "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? h, "
    "Tensor? cu_seqlens, bool softplus"
)
_CONV = "Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? cu_seqlens"
_LOSS = (
    "Tensor x, Tensor weight, Tensor labels, int ignore_index, bool wants_x, bool wants_weight, "
    "ScalarType? dtype=None"
)


def scan(
    tensors: Sequence[Tensor | None],
    mimo: Mimo | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    state: Mamba3State | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    return_state: bool,
) -> tuple[Tensor, Mamba3State | None]:
    """`mamba3_scan` as one op; `tensors` are its arguments from x to z."""
    given = (*tensors, *(mimo or (None,) * 3), norm_weight, *(state or (None,) * 4))
    options = norm_eps, chunk_size, return_state
    y, *final = torch.ops.mamba3.scan(*given, cu_seqlens, *options)
    return y, Mamba3State(*final) if return_state else None


def step(
    tensors: Sequence[Tensor | None],
    mimo: Mimo | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    state: Mamba3State,
    inplace: bool,
    state_indices: Tensor | None,
) -> tuple[Tensor, Mamba3State]:
    """`mamba3_step` as one op, not differentiable; `tensors` are its arguments from x to z."""
    given = (*tensors, *(mimo or (None,) * 3), norm_weight, *state)
    if inplace:
        return torch.ops.mamba3.step_inplace(*given, state_indices, norm_eps), state
    y, *after = torch.ops.mamba3.step(*given, norm_eps)
    return y, Mamba3State(*after)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, dtype: torch.dtype | None
) -> Tensor:
    """The sum of all losses as one op, which finds the gradients with it."""
    recorded = torch.is_grad_enabled()
    wanted = recorded and x.requires_grad, recorded and weight.requires_grad
    return torch.ops.mamba3.linear_cross_entropy(x, weight, labels, ignore_index, *wanted, dtype)[0]


def _run_scan(*args) -> tuple[Tensor, ...]:
    from .scan import mamba3_scan

    *tensors, cu_seqlens, norm_eps, chunk_size, return_state = args
    mimo_x, mimo_z, mimo_o, norm_weight, h, phase, k, x_prev = tensors[11:]
    y, final = mamba3_scan(
        *tensors[:11],
        mimo=None if mimo_x is None else (mimo_x, mimo_z, mimo_o),
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        state=None if h is None else Mamba3State(h, phase, k, x_prev),
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        return_state=return_state,
    )
    return y, *(final or ())


def _run_again(
    name: str, arguments: str, options: int, run: Callable[..., tuple], fake: Callable[..., list]
) -> None:
    """Register an op that keeps its arguments only: the backward pass runs it again.

    Args:
        name: of the op, under `torch.ops.mamba3`.
        arguments: its schema's; tensors come first.
        options: how many of them, at the end, are no tensors.
        run: what it does.
        fake: tensors like those that it returns.
    """

    @torch.library.custom_op(
        f"mamba3::{name}", mutates_args=(), schema=f"({arguments}) -> Tensor[]"
    )
    def forward(*args):
        return _owned(run(*args), args)

    @torch.library.custom_op(
        f"mamba3::{name}_backward",
        mutates_args=(),
        schema=f"(Tensor?[] grads, {arguments}, bool[] wanted) -> Tensor[]",
    )
    def backward(grads, *inputs):
        *inputs, wanted = inputs
        with (
            # The dispatcher runs an op with autograd switched off below it.
            torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
            torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
            torch.enable_grad(),
        ):
            leaves = {
                i: inputs[i].detach().requires_grad_() for i, want in enumerate(wanted) if want
            }
            outputs = run(*(leaves.get(i, t) for i, t in enumerate(inputs)))
            reached = [
                (out, grad)
                for out, grad in zip(outputs, grads, strict=True)
                if grad is not None and out.requires_grad
            ]
            outputs, output_grads = zip(*reached, strict=True) if reached else ((), ())
            found = torch.autograd.grad(
                outputs, list(leaves.values()), output_grads, materialize_grads=True
            )
        return _owned(found, [*inputs, *grads])

    def save(ctx, inputs, output):
        tensors = len(inputs) - options
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors])
        ctx.set_materialize_grads(False)

    def gradients(ctx, grads):
        wanted = ctx.needs_input_grad
        found = iter(backward(grads, *ctx.saved_tensors, *ctx.options, wanted))
        return tuple(next(found) if want else None for want in wanted)

    forward.register_fake(fake)
    forward.register_autograd(gradients, setup_context=save)

    @backward.register_fake
    def _(grads, *inputs):
        *inputs, wanted = inputs
        return [t.new_empty(t.shape) for t, want in zip(inputs, wanted, strict=True) if want]


def _fake_scan(x, b, c, dt, a, lam, rate, *others):
    cu_seqlens, _, _, return_state = others[-4:]
    y = x.new_empty(x.shape)
    if not return_state:
        return [y]
    return [
        y,
        *Mamba3State.zeros_for(
            _sequences(x, cu_seqlens), x, b, rate, device=x.device, dtype=_wide(x)
        ),
    ]


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_run_again("scan", _SCAN, 3, _run_scan, _fake_scan)


def _run_selective(*args) -> tuple[Tensor, Tensor]:
    from .selective import selective_scan

    *tensors, h, cu_seqlens, softplus = args
    return selective_scan(*tensors, softplus=softplus, h=h, cu_seqlens=cu_seqlens)


def _fake_selective(x, dt, a, b, c, d, z, h, cu_seqlens, softplus):
    states = (_sequences(x, cu_seqlens), *a.shape)
    return [x.new_empty(x.shape), x.new_empty(states, dtype=_wide(x))]


_run_again("selective_scan", _SELECTIVE, 1, _run_selective, _fake_selective)


def _run_conv(x, weight, bias, state, cu_seqlens) -> tuple[Tensor, Tensor]:
    from .conv import causal_conv

    return causal_conv(x, weight, bias, state=state, cu_seqlens=cu_seqlens)


def _fake_conv(x, weight, bias, state, cu_seqlens):
    states = (_sequences(x, cu_seqlens), weight.shape[0], weight.shape[1] - 1)
    return [x.new_empty(x.shape), x.new_empty(states, dtype=_wide(x))]


_run_again("causal_conv", _CONV, 0, _run_conv, _fake_conv)


def _run_step(*args, **options) -> tuple[Tensor, Mamba3State]:
    from .step import mamba3_step

    *tensors, norm_eps = args
    mimo_x, mimo_z, mimo_o, norm_weight, *state = tensors[11:]
    return mamba3_step(
        *tensors[:11],
        state=Mamba3State(*state),
        mimo=None if mimo_x is None else (mimo_x, mimo_z, mimo_o),
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        **options,
    )


@torch.library.custom_op(
    "mamba3::step", mutates_args=(), schema=f"({_STEP}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _step(*args):
    y, after = _run_step(*args)
    after = (new.to(old.dtype) for new, old in zip(after, args[-5:-1], strict=True))
    return tuple(_owned((y, *after), args))


@_step.register_fake
def _(*args):
    return tuple(t.new_empty(t.shape) for t in (args[0], *args[-5:-1]))


@torch.library.custom_op(
    "mamba3::step_inplace",
    mutates_args=("h", "phase", "k", "x_prev"),
    schema=f"({_STEP_INPLACE}) -> Tensor",
)
def _step_inplace(*args):
    *tensors, state_indices, norm_eps = args
    y, _ = _run_step(*tensors, norm_eps, inplace=True, state_indices=state_indices)
    return _owned([y], args)[0]


@_step_inplace.register_fake
def _(x, *others):
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "mamba3::linear_cross_entropy",
    mutates_args=(),
    schema=f"({_LOSS}) -> (Tensor, Tensor, Tensor)",
)
def _loss(x, *others):
    from .loss import total_and_gradients

    # An op returns tensors only: an empty one stands for a gradient that is not wanted.
    found = (x.new_empty(0) if t is None else t for t in total_and_gradients(x, *others))
    return tuple(_owned(found, [x, *others]))


@_loss.register_fake
def _(x, weight, labels, ignore_index, wants_x, wants_weight, dtype=None):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty(x.shape if wants_x else 0),
        weight.new_empty(weight.shape, dtype=wide) if wants_weight else x.new_empty(0),
    )


def _save_loss(ctx, inputs, output):
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.save_for_backward(*output[1:])


def _loss_gradients(ctx, grad, *_):
    from .loss import scaled

    wanted = ctx.needs_input_grad
    kept = (t if want else None for t, want in zip(ctx.saved_tensors, wanted, strict=False))
    return *scaled(*kept, grad, ctx.dtypes), *[None] * 5


_loss.register_autograd(_loss_gradients, setup_context=_save_loss)


def _owned(outputs: Iterable[Tensor], inputs: Iterable) -> list[Tensor]:
    """The outputs, contiguous and each alone in its memory, as the compiler takes them to be."""
    taken = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
    owned = []
    for t in outputs:
        storage = t.untyped_storage()
        alone = storage.nbytes() == t.nbytes and storage.data_ptr() not in taken
        if not (alone and t.is_contiguous()):
            t = t.clone(memory_format=torch.contiguous_format)
        taken.add(t.untyped_storage().data_ptr())
        owned.append(t)
    return owned
