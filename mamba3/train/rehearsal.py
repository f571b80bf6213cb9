"""rehearse: a GPU's training step on the meta device, which stands in for it and keeps account.

The step is the real one: model, autograd, recomputation, optimizer and the launchers of kernels run
as they would, on tensors that have no memory, and their storages come and go as they would. What
is replaced is what meta lacks: kernels are not launched, and `torch.autocast` is written out.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mamba3.ops import dispatch
from mamba3.ops import loss as loss_op
from mamba3.train import step as train_step
from mamba3.train.step import Part, TrainStep

# What CUDA's allocator rounds requests up to.
GRANULE = 512
# Of an H200; scans are cut into as many walks as keep them busy.
MULTIPROCESSORS = 132
# Workspaces of cuBLAS on Hopper, 32 MiB each: of the forward and of the backward pass's thread.
CUBLAS_BYTES = 2 << 25


class Storage:
    """A storage that was made.

    Attributes:
        nbytes: its size, rounded as the allocator does.
        phase: what made it: "model", "optimizer state", one of `step.RANGES`, or the "step" between
            them.
        is_gradient: whether it became a parameter's gradient.
        is_copy: whether it is a parameter in the dtype of autocast.
        outlived: the phases that it was there at the end of.
    """

    def __init__(self, nbytes: int, phase: str):
        self.nbytes, self.phase = nbytes, phase
        self.is_gradient = self.is_copy = False
        self.outlived: set[str] = set()


class Account(TorchDispatchMode):
    """Follows the storages that ops make inside of a `with` block.

    Args:
        device_type: where the storages are.

    Attributes:
        allocated: bytes that exist now.
        peak: the most there have been since `start_peak`.
        at_peak: what existed then.
        peak_phase: in which phase that was.
    """

    def __init__(self, device_type: str = "meta"):
        super().__init__()
        self.device_type, self.phase, self.allocated = device_type, "step", 0
        self._live: dict[int, tuple[Storage, weakref.ref]] = {}
        self.start_peak()

    def start_peak(self) -> None:
        """Forget the peak so far."""
        self.peak, self.peak_phase, self.at_peak = self.allocated, self.phase, self.live()

    def live(self) -> list[Storage]:
        """What exists now."""
        return [storage for storage, _ in self._live.values()]

    def of(self, t: Tensor) -> Storage:
        """The storage of a tensor that exists."""
        return self._live[t.untyped_storage()._cdata][0]

    @contextlib.contextmanager
    def range(self, phase: str) -> Iterator[None]:
        """What is made inside of a `with` block is of a phase; as `record_function`."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before
        for storage in self.live():
            storage.outlived.add(phase)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing that is made inside of a `with` block counts."""
        with _disable_current_modes():
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.device.type == self.device_type:
                self._note(t.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        made = Storage(-(-storage.nbytes() // GRANULE) * GRANULE, self.phase)
        self._live[key] = made, weakref.ref(storage, lambda _: self._gone(key))
        self.allocated += made.nbytes
        if self.allocated > self.peak:
            self.start_peak()

    def _gone(self, key: int) -> None:
        self.allocated -= self._live.pop(key)[0].nbytes


class Autocast:
    """`torch.autocast` for meta tensors, as far as linear layers go; no other op here heeds it.

    Copies of parameters are kept until the outermost `autocast` ends, as torch does.

    Args:
        account: is told which tensors are such copies.
    """

    def __init__(self, account: Account):
        self.account = account
        self.dtype: torch.dtype | None = None
        self._depth = 0
        self._copies: dict[int, Tensor] = {}
        self._linear = nn.functional.linear

    @contextlib.contextmanager
    def autocast(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **_: Any
    ) -> Iterator[None]:
        """In the place of `torch.autocast`."""
        before = self.dtype
        if device_type == "meta":
            self.dtype = dtype if enabled else None
        self._depth += 1
        try:
            yield
        finally:
            self.dtype = before
            self._depth -= 1
            if not self._depth:
                self._copies.clear()

    def is_enabled(self, device_type: str | None = None) -> bool:
        """In the place of `torch.is_autocast_enabled`."""
        return device_type == "meta" and self.dtype is not None

    def get_dtype(self, device_type: str) -> torch.dtype:
        """In the place of `torch.get_autocast_dtype`."""
        return self.dtype or torch.bfloat16

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In the place of `F.linear`."""
        if self.dtype is not None:
            x, weight = self._cast(x), self._cast(weight)
            bias = None if bias is None else self._cast(bias)
        return self._linear(x, weight, bias)

    def _cast(self, t: Tensor) -> Tensor:
        if t.dtype == self.dtype or not t.is_leaf or not t.requires_grad:
            return t.to(self.dtype)
        if id(t) not in self._copies:
            self._copies[id(t)] = t.to(self.dtype)
            self.account.of(self._copies[id(t)]).is_copy = True
        return self._copies[id(t)]


def rehearse(
    make: Callable[[], TrainStep], shapes: Sequence[tuple[int, int]], *, buckets: bool = False
) -> Account:
    """Make a step, on the meta device, that stands for a GPU.

    Not while another thread uses torch: parts of it are replaced meanwhile.

    Args:
        make: builds the model, on the meta device, and its step.
        shapes: (rows, length) of the parts of the batch.
        buckets: whether gradients lie in buckets that stay, as DistributedDataParallel has them.

    Returns:
        An account whose peak is that of the step.
    """
    account = Account()
    with _meta_as_gpu(account), account:
        with account.range("optimizer state"):
            step = make()
        parameters = list(step.model.parameters())
        for parameter in parameters:
            account.of(parameter).phase = "model"
        # Whether to skip the step would be read from the device.
        step.optimizer.skip_nonfinite = False
        kept = {p: torch.empty_like(p) for p in parameters if buckets}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_gradient_noter(account, kept))
        for bucket in kept.values():
            account.of(bucket).is_gradient = True
        parts = [_part(*shape) for shape in shapes]
        step.model.train()
        account.start_peak()
        step.run(parts)
    return account


def _part(rows: int, length: int) -> Part:
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    return Part(ids, torch.empty_like(ids), torch.empty((), device="meta"), None)


def _gradient_noter(account: Account, buckets: dict[Tensor, Tensor]) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        if parameter in buckets:
            parameter.grad = buckets[parameter]
        account.of(parameter.grad).is_gradient = True

    return note


@contextlib.contextmanager
def _meta_as_gpu(account: Account) -> Iterator[None]:
    """Have meta tensors taken for those of a GPU, by the package's own code and by autocast."""
    autocast = Autocast(account)
    name = dispatch.backend("cuda")
    replaced = [
        (torch.Tensor, "is_cuda", property(lambda t: t.is_meta)),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (torch, "autocast", autocast.autocast),
        (torch.amp, "autocast", autocast.autocast),
        (torch.amp, "is_autocast_available", lambda device_type: True),
        (torch, "is_autocast_enabled", autocast.is_enabled),
        (torch, "get_autocast_dtype", autocast.get_dtype),
        (dispatch, "available", lambda device: list(dispatch.BACKENDS)),
        (nn.functional, "linear", autocast.linear),
        (train_step, "record_function", account.range),
    ]
    if loss_op.ADDS_WIDE:
        # It takes no memory, but on meta tensors torch 2.11 cannot do it.
        replaced.append((loss_op, "_add_product", lambda total, a, b: None))
    with contextlib.ExitStack() as stack:
        for of, attribute, value in replaced:
            stack.enter_context(mock.patch.object(of, attribute, value, create=True))
        if name == "triton":
            stack.enter_context(_no_launches(account))
        stack.enter_context(dispatch.use_backend(name))
        yield


@contextlib.contextmanager
def _no_launches(account: Account) -> Iterator[None]:
    """Let launches of kernels do nothing."""
    from triton.runtime.jit import KernelInterface

    from mamba3.ops.triton import scan, selective_launch

    def launch(kernel, grid) -> Callable[..., None]:
        return lambda *args, **constants: None

    def paused(method: Callable) -> Callable:
        def unseen(*args):
            with account.paused():
                return method(*args)

        return unseen

    with (
        mock.patch.object(KernelInterface, "__getitem__", launch),
        mock.patch.object(scan, "multiprocessors", return_value=MULTIPROCESSORS),
        mock.patch.object(selective_launch, "multiprocessors", return_value=MULTIPROCESSORS),
        # Its arguments are described by meta tensors, which take no memory on a GPU either, and its
        # layout, of some kilobytes, is kept: it would count the first time alone.
        mock.patch.object(scan.Scan, "__init__", paused(scan.Scan.__init__)),
        mock.patch.object(scan.Scan, "_laid_out", paused(scan.Scan._laid_out)),
    ):
        yield
