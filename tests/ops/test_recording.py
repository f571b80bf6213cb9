"""What recorded kernels read is kept for as long as the recording, whatever caches forget."""

import gc
import threading
import weakref

import torch
from compare import DEVICE, call_arguments, gradients, scan_inputs

from mamba3.ops import mamba3_scan, use_backend
from mamba3.ops.recording import keep, keeping


def test_the_layout_of_a_scan_outlives_its_cache():
    from mamba3.ops.triton import layout
    from mamba3.ops.triton.scan import Scan

    tensors, _ = scan_inputs(length=9, heads=2, dtype=torch.float32)
    tensors = {k: v.detach().to(DEVICE).requires_grad_() for k, v in tensors.items()}
    with use_backend("triton"), keeping() as kept:
        y, _ = mamba3_scan(**call_arguments(tensors))
        gradients((y,), tensors)
    tables = [weakref.ref(t) for tables in kept for t in tables]
    assert tables
    Scan._cached.cache_clear()
    layout.layout.cache_clear()
    layout.layout_of.cache_clear()
    del y
    gc.collect()
    assert all(table() is not None for table in tables)


def test_recordings_keep_what_is_read_in_their_time_on_any_thread():
    with keeping() as outer:
        keep(1)
        with keeping() as inner:
            thread = threading.Thread(target=keep, args=(2,))
            thread.start()
            thread.join()
        keep(3)
    keep(4)
    assert (outer, inner) == ([1, 2, 3], [2])
