"""What every autograd.Function of this package needs around its forward and backward."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def no_autocast(function):
    """Decorator: run in the dtype of the arguments, also under `torch.autocast`.

    The state and the decays lose their meaning in half precision, and a backward pass that
    autocast reached would mix dtypes. The device is that of the first tensor argument.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        device = next(tensors).device.type
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast computes a product of x in; None where it leaves it alone."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return None


def first_order(backward):
    """Decorator for a hand-written backward: no autocast, and no silent second derivative.

    torch's own once_differentiable lets create_graph=True pass, without a gradient, wherever the
    incoming gradient is a constant.
    """

    @functools.wraps(backward)
    def wrapped(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this op has no second derivative: call backward without create_graph=True, or "
                "run under mamba3.ops.use_backend('reference'), which torch can differentiate twice"
            )
        return no_autocast(backward)(ctx, *grads)

    return wrapped


def differentiated(*args) -> bool:
    """Whether gradients of an op of these are recorded; what is no tensor does not count."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args)


def written(own: Tensor, after: Tensor) -> Tensor:
    """A tensor that a kernel has updated, itself or as its dense copy `after`."""
    if own is not after:
        own.copy_(after)
    # A graph that saved this tensor for its backward pass must see that it has changed.
    torch.autograd.graph.increment_version(own)
    return own


def run(function, *args):
    """Run an autograd.Function, or its forward alone where nothing is differentiated.

    `Function.apply` costs more than a small op itself; decoding is bound by such costs.
    """
    if differentiated(*args):
        return function.apply(*args)
    return function.forward(_NoContext(len(args)), *args)


class _NoContext:
    """Stands in for autograd's context where nothing is differentiated."""

    def __init__(self, inputs: int):
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *tensors):
        pass

    def set_materialize_grads(self, value):
        pass
