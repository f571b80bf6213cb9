"""Compile kernels of scan, loss and optimizer for GPUs that are not here; report what each needs.

    python tests/ops/compile_kernels.py CAPABILITY FORM...
    python tests/ops/compile_kernels.py forms LENGTH...

Every launch of a forward and backward pass is compiled instead of run, with the very arguments that
it would be launched with. Prints one JSON object a kernel. The second form compiles nothing, and
prints how many compiled forms all launches at all the lengths need.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mamba3.ops.loss import empty_logits
from mamba3.ops.triton import conv, loss, selective_launch, selective_step
from mamba3.ops.triton import scan as launchers
from mamba3.optim import Rails
from mamba3.optim.adamw import AdamWList
from mamba3.optim.banks import MuonBank
from mamba3.optim.param_groups import Piece
from mamba3.optim.pieces import Member, Numbers, Options
from mamba3.optim.triton import adamw, launch, updates

FORMS = {
    "siso": {"headdim": 64, "d_state": 128, "angles": 32, "dtype": torch.bfloat16},
    "mimo": {"headdim": 64, "d_state": 128, "angles": 32, "dtype": torch.bfloat16, "rank": 4},
    "siso-float32": {"headdim": 64, "d_state": 128, "angles": 32, "dtype": torch.float32},
    "siso-N256": {"headdim": 128, "d_state": 256, "angles": 64, "dtype": torch.bfloat16},
    "siso-small": {"headdim": 32, "d_state": 64, "angles": 16, "dtype": torch.bfloat16},
    "siso-N64": {"headdim": 64, "d_state": 64, "angles": 16, "dtype": torch.bfloat16},
    "mimo-P32": {"headdim": 32, "d_state": 128, "angles": 32, "dtype": torch.bfloat16, "rank": 4},
    "mimo-odd": {"headdim": 6, "d_state": 10, "angles": 3, "dtype": torch.float16, "rank": 3},
}
LOSSES = {
    "loss": {"rows": 4, "vocab": 128256, "dtype": torch.bfloat16},
    "loss-float32": {"rows": 3, "vocab": 50257, "dtype": torch.float32},
    "loss-odd": {"rows": 3, "vocab": 21, "dtype": torch.float16},
}
MAMBA = {
    "mamba": {"dtype": torch.bfloat16, "d_state": 16},
    "mamba-float32": {"dtype": torch.float32, "d_state": 16},
    "mamba-wide": {"dtype": torch.float16, "d_state": 128},
}
UPDATES = {
    "updates": {"shape": (96, 64), "stored": torch.float32},
    "updates-bits": {"shape": (96, 64), "stored": torch.bfloat16, "bits": True},
    "updates-odd": {"shape": (9, 7), "stored": torch.float16},
}
ADAMW = {
    "adamw": {"stored": torch.float32},
    "adamw-bits": {"stored": torch.bfloat16, "bits": True, "cautious": True},
    "adamw-every": {"stored": torch.float16, "every": 2},
}
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Of Hopper's machine code: an instruction and its operands; uniform registers as they are read.
INSTRUCTION = re.compile(r"(?:@!?U?P[T0-9] +)?\b([A-Z][A-Z0-9_.]*) +([^;]+);")
UNIFORM = re.compile(r"UR(\d+)")
USES = re.compile(r"(gdesc\[|desc\[)?UR(\d+)")
TO_UNIFORM = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX", "LDCU")


class Compiler:
    """Stands in for `Launcher`: compiles what it would launch."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def __call__(self, kernel, grid, *args, variant=None, **constants):
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg")
                   if name in constants}  # fmt: skip
        if "FAST" in constants:
            constants["FAST"] = True
        if "PRECISION" in constants:
            constants["PRECISION"] = "tf32x3"
        if "DOT" in constants:
            constants["DOT"] = args[0].dtype != torch.float32
        names = kernel.arg_names
        assert len(args) + len(constants) == len(names), kernel.__name__
        signature = {
            name: TYPES[a.dtype] if torch.is_tensor(a) else "fp32" if type(a) is float else "i32"
            for name, a in zip(names, args, strict=False)
        } | dict.fromkeys(constants, "constexpr")
        # Tensors and strides as Triton specialises them: on divisibility by 16.
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, a in enumerate(args)
            if type(a) is not float and (a.data_ptr() if torch.is_tensor(a) else a) % 16 == 0
        }
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=self.target, options=options)
        found = {"kernel": kernel.__name__, "shared": compiled.metadata.shared}
        found |= {"unguarded": unguarded(compiled.asm["ptx"])}
        found |= {"unset": unset_registers(compiled.asm["sass"])}
        print(json.dumps(found), flush=True)


def unguarded(ptx: str) -> int:
    """Products that may read shared memory before all threads have written it.

    Triton (3.6 to 3.9 at least) leaves the barrier out where a product's left factor, made by
    another product, has to change to the tiling of this one.
    """
    count, written = 0, False
    for line in ptx.splitlines():
        if "st.shared" in line or "stmatrix" in line:
            written = True
        elif "bar.sync" in line or "bar.warp" in line:
            written = False
        elif "wgmma.mma_async" in line:
            count, written = count + written, False
    return count


def unset_registers(sass: str) -> list[str]:
    """Instructions that read a uniform register which none before them has written.

    Hopper's products find their factors in shared memory by addresses in such registers. ptxas 12.8
    (not 12.9) loses one where factors of several widths lie at the same address: what is multiplied
    then depends on which kernel ran before, and may be outside the program's memory.
    """
    written, found = set(), []
    for line in sass.splitlines():
        match = INSTRUCTION.search(line)
        if match is None:
            continue
        name, operands = match[1], [one.strip() for one in match[2].split(",")]
        target = UNIFORM.fullmatch(operands[0]) if name.startswith(TO_UNIFORM) else None
        pair = ".64" in name and name.startswith("U")
        read = set()
        for before, first in USES.findall(",".join(operands[target is not None :])):
            # Of the two factors' addresses, the left one is not read if that is in registers.
            start = 2 if before == "gdesc[" and "gdesc" in "".join(operands[2:]) else 0
            stop = {"gdesc[": 4, "desc[": 2}.get(before, 1 + pair)
            read |= {int(first) + i for i in range(start, stop)}
        if name == "UPRMT" and target is not None:
            read.discard(int(target[1]))  # a half word put beside another, which nobody may read
        if not read <= written:
            found.append(match[0])
        if target is not None:
            wide = 2 if ".64" in name or ".WIDE" in name else 1
            written |= {int(target[1]) + i for i in range(wide)}
    return found


def compiled_forms(lengths) -> set:
    """Everything that Triton would compile for scans of these lengths, and several batch sizes."""
    forms = set()
    for length in lengths:
        for batch in (1, 2, 3):
            for kernel, args, constants in scan_of(batch, length).launches(training=True):
                free = {param.name for param in kernel.params if param.do_not_specialize}
                kinds = [
                    a.dtype if torch.is_tensor(a) else name not in free and (a == 1, a % 16 == 0)
                    for name, a in zip(kernel.arg_names, args, strict=False)
                ]
                forms.add((kernel.__name__, *kinds, *constants.items()))
    return forms


def scan_of(batch: int, length: int) -> launchers.Scan:
    """A scan over slices of one wide projection, as in the layer."""
    heads, headdim, d_state = 4, 16, 32
    wide = torch.zeros(batch, length, 2 * heads * headdim + 2 * d_state + 5, dtype=torch.bfloat16)
    x = wide[..., : heads * headdim].unflatten(-1, (heads, headdim))
    maps = wide[..., -2 * d_state :].unflatten(-1, (2, 1, 1, d_state)).unbind(2)
    per_head = [torch.zeros(batch, length, heads) for _ in range(3)]
    bias = torch.zeros(heads, 1, d_state)
    inputs = (x, *maps, *per_head, torch.zeros(batch, length, 8), bias, bias, torch.zeros(heads))
    bounds = range(0, batch * length + 1, length)
    return launchers.Scan.of(launchers.Inputs(*inputs, None), bounds, None)


def compile_form(capability: int, headdim, d_state, angles, dtype, rank=1) -> None:
    """All launches of a scan with a state, in segments, packed or not being the same kernels."""
    heads, tokens, sequences = 2, 200, 2

    def empty(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype)

    maps = empty(1, tokens, rank, 1, d_state, dtype=dtype)
    per_head = (empty(1, tokens, heads) for _ in range(3))
    bias = empty(heads, rank, d_state)
    mimo = empty(heads, rank, headdim) if rank > 1 else None
    inputs = launchers.Inputs(
        empty(1, tokens, heads, headdim, dtype=dtype), maps, maps, *per_head,
        empty(1, tokens, angles), bias, bias, empty(heads), mimo,
    )  # fmt: skip
    launchers.PROGRAMS_PER_SM = 100  # several segments, on a CPU that counts as one multiprocessor
    scan = launchers.Scan.of(inputs, (0, 80, tokens), None)
    scan.launch = Compiler(capability)
    chunks, _ = scan.chunks(inputs, empty(sequences, heads, angles))
    h0 = empty(sequences, heads, headdim, d_state)
    states, _ = scan.states(inputs, chunks, inputs.x, h0, reverse=False)
    y = scan.outputs(inputs, chunks, states)
    d_states, _ = scan.states(inputs, chunks, y, h0, reverse=True)
    tail = empty(sequences, heads, 2, angles + 1)
    scan.gradients(inputs, chunks, y, states, d_states, tail)


def compile_loss(capability: int, rows, vocab, dtype) -> None:
    """With and without a gradient."""
    logits = empty_logits(rows, torch.empty(vocab, 1, dtype=dtype))
    labels, losses = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    for differentiate in (False, True):
        args, constants = loss.launch_of(logits, labels, losses, -100, differentiate)
        Compiler(capability)(loss.cross_entropy_kernel, (rows,), *args, **constants)


def compile_mamba(capability: int, dtype, d_state) -> None:
    """Mamba-1's scan and convolution, forward and backward, in segments, with states; a step."""
    compiler = Compiler(capability)
    for module in (selective_launch, conv, selective_step):
        module.launch = compiler
    selective_launch.PROGRAMS_PER_SM = 100
    bounds, width = (0, 80, 200), 192
    wide = torch.zeros(1, 200, 2 * width, dtype=dtype)
    x, z = wide.split(width, -1)
    maps = torch.zeros(1, 200, d_state, dtype=dtype)
    a, h = -torch.ones(width, d_state), torch.zeros(2, width, d_state)
    call = x, x, a, maps, maps, torch.ones(width), z, h
    inputs = selective_launch.Inputs.of(*call)
    scan = selective_launch.SelectiveScan(inputs, bounds, True)
    y, final, *kept = scan.forward(inputs, training=True)
    scan.backward(inputs, *kept, y, final)
    weight, bias, state = torch.zeros(width, 4), torch.zeros(width), torch.zeros(2, width, 3)
    own = conv.Conv(x, weight, True, bounds)
    y, final = own.forward(x, weight, bias, state)
    own.backward(x, weight, bias, state, y, final)
    token = x[0, :2], x[0, :2], a, maps[0, :2], maps[0, :2], bias, z[0, :2]
    selective_step.step(*token, h, h, True)
    conv.step(x[0, :2], weight, bias, state, state)


def options_of(capability: int, **given) -> Options:
    """Options of an optimizer whose kernels are compiled."""
    compiler = Compiler(capability)
    launch._launcher = lambda *known: compiler
    return Options(**{
        "preset": "anvil6", "lr_rule": "original", "nesterov": True, "rails": Rails(),
        "equalize": None, "row_equalize": False, "trace_norm": False, "cautious": False,
        "decay_adjusted": True, "extra_bits": False, "adam_every": 1, "dtype": torch.bfloat16,
    } | given)  # fmt: skip


def compile_adamw(capability: int, stored, bits=False, cautious=False, every=1) -> None:
    """A step of two pieces, and what comes before it where there are several gradients to one."""
    options = options_of(capability, extra_bits=bits, cautious=cautious, adam_every=every)
    grads = [torch.zeros(size, dtype=stored) for size in (2048, 7)]
    piece = Piece("weight", "", 0, 0, (), "adamw", None, 1.0, "")
    those = AdamWList([Member(piece, grad.clone()) for grad in grads], options)
    numbers = Numbers(1.0, 0.1, 0.9, 0.9, 0.5)
    for active in (False, True)[every == 1 :]:
        adamw.step(those, grads, numbers, (0.9, 0.95), 1e-8, active)


def compile_updates(capability: int, shape, stored, bits=False) -> None:
    """Momentum of two rails, scale, and lanes and weights with updates by row and by column."""
    options = options_of(capability, cautious=True, extra_bits=bits)
    weight = torch.zeros(shape, dtype=stored)
    piece = Piece("weight", "", 0, len(weight), shape, "muon", None, 1.0, "")
    bank, numbers = MuonBank([Member(piece, weight)], options), Numbers(1.0, 0.1, 0.9, 0.9, 0.5)
    u, _ = updates.momentum(bank, slice(0, 1), [weight], numbers, torch.bfloat16, True)
    updates.scale(u, torch.ones(1, 1, 1), u.half())
    for done in (u, torch.empty_like(u.mT, dtype=torch.float16).mT):
        factors = updates.lane_squares(done)
        updates.apply(bank, slice(0, 1), done, numbers)
        updates.apply(bank, slice(0, 1), done, numbers, factors)


if __name__ == "__main__":
    if sys.argv[1] == "forms":
        print(len(compiled_forms(map(int, sys.argv[2:]))))
        sys.exit()
    for name in sys.argv[2:]:
        if name in LOSSES:
            compile_loss(int(sys.argv[1]), **LOSSES[name])
        elif name in MAMBA:
            compile_mamba(int(sys.argv[1]), **MAMBA[name])
        elif name in UPDATES:
            compile_updates(int(sys.argv[1]), **UPDATES[name])
        elif name in ADAMW:
            compile_adamw(int(sys.argv[1]), **ADAMW[name])
        else:
            compile_form(int(sys.argv[1]), **FORMS[name])
