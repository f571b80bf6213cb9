"""Symmetric products against float64: the kernel on a GPU if there is one, else interpreted."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from compare import DEVICE, TOLERANCE, assert_close
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mamba3.ops import use_backend
from mamba3.optim import symmetric
from mamba3.optim.symmetric import symmetric_product
from mamba3.optim.triton import symmetric as kernels
from mamba3.optim.triton.symmetric import GROUP, Config, _kernel, _place, _tiles, launch

# Triton's interpreter multiplies matrices of bfloat16 as integers.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = [HALF, torch.float32]
BACKENDS = ["torch", "triton"]


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def symmetric_term(batch, size, dtype, seed=1):
    term = normal(batch, size, size, dtype=torch.float64, seed=seed)
    return (term + term.mT).to(dtype)


def expected(p, q, alpha=1.0, add=None, beta=0.0, diagonal=0.0):
    result = alpha * p.double() @ q.double().mT
    if add is not None:
        result += beta * add.double()
    return result + diagonal * torch.eye(p.shape[1], dtype=torch.float64, device=DEVICE)


def is_mirrored(t):
    """Bit for bit; a NaN, which an element that was not written is, equals nothing."""
    return torch.equal(t, t.mT)


@pytest.fixture
def launches(monkeypatch):
    """Counts the kernel's launches, since the library's result would pass every comparison."""
    counted = []

    def counting(*args):
        counted.append(1)
        return launch(*args)

    monkeypatch.setattr(kernels, "launch", counting)
    return counted


@pytest.mark.parametrize("terms", ["product", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 33, 70), (1, 64, 32), (1, 130, 17), (1, 272, 8)])
def test_kernel_equals_reference(shape, dtype, terms, launches):
    batch, size, _ = shape
    x = normal(*shape, dtype=dtype)
    terms = {} if terms == "product" else {
        "alpha": -0.75, "add": symmetric_term(batch, size, dtype), "beta": 1.5, "diagonal": 2.5,
    }  # fmt: skip
    out = x.new_full((batch, size, size), float("nan"))
    with use_backend("triton"):
        got = symmetric_product(x, x, **terms, out=out)
        again = symmetric_product(x, x, **terms)
    assert len(launches) == 2
    assert got is out
    assert_close(out, expected(x, x, **terms), TOLERANCE[dtype])
    assert is_mirrored(out)
    assert torch.equal(again, out)


def test_all_tiles_of_many():
    """Small tiles, over sizes that end anywhere in one, the largest in two groups of columns."""
    config = Config(block=16, step=16, warps=4, stages=1)
    for batch, size in ((2, 15), (2, 16), (2, 17), (2, 33), (2, 48), (1, 150)):
        x, d = normal(batch, size, 24), symmetric_term(batch, size, torch.float32)
        out, behind = x.new_full((batch + 1, size, size), float("nan")).split((batch, 1))
        launch(x, x, 2.0, d, 0.5, -1.0, out, config)
        assert_close(out, expected(x, x, 2.0, d, 0.5, -1.0), TOLERANCE[torch.float32], str(size))
        assert is_mirrored(out)
        assert behind.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_iteration_of_newton_schulz(backend):
    """Its three kinds of products, of tall matrices whose transposes are read where they lie."""
    x = normal(2, 90, 40, dtype=HALF).mT
    x /= x.double().norm(dim=(1, 2), keepdim=True).to(HALF)
    with use_backend(backend):
        gram = symmetric_product(x, x)
        gram_of_rows = symmetric_product(x.mT, x.mT)
        square = symmetric_product(gram, gram, alpha=2.0, add=gram, beta=-4.8, diagonal=3.4)
        product = symmetric_product(square, gram.mT)
    assert not x.is_contiguous()
    tolerance = 2 * TOLERANCE[HALF]
    assert_close(gram, expected(x, x), tolerance, "X X'")
    assert_close(gram_of_rows, expected(x.mT, x.mT), tolerance, "X' X")
    assert_close(square, expected(gram, gram, 2.0, gram, -4.8, 3.4), tolerance, "aI + bA + cA^2")
    assert_close(product, expected(square, gram), tolerance, "Z A")
    if backend == "triton":
        assert all(map(is_mirrored, (gram, gram_of_rows, square, product)))


def views():
    """The same matrices (2, 37, 50) in other places, and other than row by row."""
    x = normal(2, 37, 50)
    yield "columns", x.mT.contiguous().mT
    wide = normal(2, 50, 64)
    wide[:, 5:42, 7:57] = x
    yield "slice", wide[:, 5:42, 7:57]
    yield "batch inside", x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    yield "aligned rows", torch.nn.functional.pad(x, (0, 6, 0, 3))[:, :37, :50]


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_equal_copies(backend):
    x, d = normal(2, 37, 50), symmetric_term(2, 37, torch.float32)
    whole = expected(x, x, add=d, beta=1.0)
    with use_backend(backend):
        for (one, p), (other, q) in itertools.product(views(), views()):
            assert torch.equal(p, x)
            got = symmetric_product(p, q, add=d.mT, beta=1.0)
            assert_close(got, whole, TOLERANCE[torch.float32], f"{one}, {other}")
        one = x[:1].expand(3, -1, -1)
        got = symmetric_product(one, one, add=d[:1].expand(3, -1, -1), beta=1.0)
        assert_close(got, whole[:1].expand(3, -1, -1), TOLERANCE[torch.float32], "expanded")


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_of_the_added_term(backend):
    x, d = normal(2, 150, 20), symmetric_term(2, 150, torch.float32)
    whole = expected(x, x, add=d, beta=0.5)
    with use_backend(backend):
        assert symmetric_product(x, x, add=d, beta=0.5, out=d) is d
    assert_close(d, whole, TOLERANCE[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_terms_with_a_factor_of_zero(backend):
    x, d = normal(2, 20, 20), symmetric_term(2, 20, torch.float32)
    with use_backend(backend):
        got = symmetric_product(x, x, alpha=0, add=d, beta=2, diagonal=1)
        assert_close(got, expected(x, x, 0.0, d, 2.0, 1.0), TOLERANCE[torch.float32])
        # A factor of 0 takes away what is infinite, too.
        got = symmetric_product(x, x, add=torch.full_like(d, float("inf")))
        assert_close(got, expected(x, x), TOLERANCE[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(shape, backend):
    x = normal(*shape)
    with use_backend(backend):
        got = symmetric_product(x, x, diagonal=2.0)
    assert torch.equal(got.double(), expected(x, x, diagonal=2.0))


def test_float64_and_the_default(launches, monkeypatch):
    monkeypatch.delenv("MAMBA3_BACKEND", raising=False)
    monkeypatch.setattr(symmetric, "KERNEL_ROWS", 32)
    x = normal(2, 32, 24, dtype=torch.float64)
    with use_backend("triton"):
        assert_close(symmetric_product(x, x), expected(x, x), TOLERANCE[torch.float64])
    few, single = x[:, :31].to(HALF), x.float()
    assert_close(symmetric_product(few, few), expected(few, few), TOLERANCE[HALF])
    assert_close(
        symmetric_product(single, single), expected(single, single), TOLERANCE[torch.float32]
    )
    assert not launches
    many = x.to(HALF)
    assert_close(symmetric_product(many, many), expected(many, many), TOLERANCE[HALF])
    assert len(launches) == (symmetric.capability(many.device) in (8, 9))


def test_gradients_are_not_recorded():
    x = normal(1, 20, 20).requires_grad_()
    for backend in BACKENDS:
        with use_backend(backend):
            assert not symmetric_product(x, x).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"p": (6, 8)}, ValueError, r"one shape \(K, M, L\), got \(6, 8\) and \(2, 6, 8\)"),
        ({"q": (2, 6, 9)}, ValueError, r"got \(2, 6, 8\) and \(2, 6, 9\)"),
        ({"add": (2, 6, 5)}, ValueError, r"expected add of shape \(2, 6, 6\), got \(2, 6, 5\)"),
        ({"out": (6, 6)}, ValueError, r"expected out of shape \(2, 6, 6\), got \(6, 6\)"),
        ({"q": torch.float16}, TypeError, "q is torch.float16 and p is torch.float32"),
        ({"add": torch.float64}, TypeError, "add is torch.float64 and p is torch.float32"),
        ({"out": "meta"}, ValueError, "out is on meta and p is on"),
    ],
)
def test_wrong_arguments(change, error, message, backend):
    call = {"p": normal(2, 6, 8), "q": normal(2, 6, 8), "add": normal(2, 6, 6),
            "out": normal(2, 6, 6)}  # fmt: skip
    for name, to in change.items():
        call[name] = normal(*to) if isinstance(to, tuple) else call[name].to(to)
    with use_backend(backend), pytest.raises(error, match=message):
        symmetric_product(call.pop("p"), call.pop("q"), beta=1.0, **call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_tensors(backend):
    x = normal(2, 6, 6)
    with use_backend(backend):
        with pytest.raises(TypeError, match=r"floating-point matrices, got torch.int64"):
            symmetric_product(x.long(), x.long())
        with pytest.raises(ValueError, match=r"contiguous out, got strides \(36, 1, 6\)"):
            symmetric_product(x, x, out=torch.empty_like(x).mT)
        with pytest.raises(ValueError, match="out is one of the factors"):
            symmetric_product(x, x, out=x)


@triton.jit
def _places_kernel(out_ptr, tiles, columns, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tiles - 1)
    row, column = _place(t, columns, GROUP)
    tl.store(out_ptr + 2 * t, row)
    tl.store(out_ptr + 2 * t + 1, column)


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 16, 17, 19, 511, 1000])
def test_every_tile_once(columns):
    tiles = _tiles(columns * 16, 16)
    assert _tiles(columns * 16 - 15, 16) == tiles
    got = torch.full((tiles, 2), -1, dtype=torch.int32, device=DEVICE)
    _places_kernel[(triton.cdiv(tiles, 4096),)](got, tiles, columns, GROUP, 4096)
    row, column = got.cpu().unbind(1)
    one_by_one = torch.zeros(columns, columns, dtype=torch.int32)
    one_by_one.index_put_((row.long(), column.long()), torch.tensor(1, dtype=torch.int32), True)
    assert torch.equal(one_by_one, torch.ones_like(one_by_one).triu())
    # What runs at the same time shares what it reads: 16 panels at best, 65 without groups.
    together = torch.stack((row, column))[:, : tiles // 64 * 64].unflatten(1, (-1, 64))
    panels = [len(set(r)) + len(set(c)) for r, c in together.transpose(0, 1).tolist()]
    assert max(panels, default=0) <= 32


def test_offsets_past_32_bits():
    """Matrices, and rows, so far apart; only their pages are ever touched."""
    stride = (1 << 30) + 16
    memory = torch.empty(2 * stride + 17 * 16, dtype=HALF, device=DEVICE)
    for strides in ((16, 1), (1, 16)):
        far = memory.as_strided((3, 16, 16), (stride, *strides))
        x = far.copy_(normal(3, 16, 16, dtype=HALF))
        with use_backend("triton"):
            assert_close(symmetric_product(x, x), expected(x, x), TOLERANCE[HALF], str(strides))
    rows = memory.as_strided((1, 3, 16), (1, stride, 1))
    rows.copy_(normal(1, 3, 16, dtype=HALF))
    for x in (rows, rows.mT):
        with use_backend("triton"):
            assert_close(symmetric_product(x, x), expected(x, x), TOLERANCE[HALF], "rows")


@pytest.mark.parametrize(
    ("capability", "dtype", "shared"),
    [(90, "bf16", 113), (80, "bf16", 99), (120, "bf16", 99), (80, "fp32", 99), (120, "fp32", 99)],
)
def test_compiles_for_gpus(capability, dtype, shared):
    """Within a GPU's shared memory in KB, half of Hopper's, and as it must be to be fast."""
    done = subprocess.run(
        [sys.executable, __file__, str(capability), dtype],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for found in map(json.loads, done.stdout.splitlines()):
        assert found["shared"] <= shared * 1024
        assert found["wgmma"] == (capability == 90)
        # Loads of 16 bytes, ahead of the products where that is right.
        assert found["ahead"] == (capability < 100)
        assert found["narrow"] == 0


def compile_for(capability: int, dtype: str) -> None:
    """Compile the kernel for a GPU that is not here, and print what it is made of, as JSON."""
    kernels.capability = lambda _: capability // 10
    config = kernels.config(
        torch.device("cuda"), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    )
    floats = ("alpha", "beta_by_alpha", "gamma")
    for dense, add in ((False, False), (True, True)):
        constants = {"P_ROWS_DENSE": dense, "Q_ROWS_DENSE": dense, "ADD": add, "UNIT": 16,
                     "BLOCK": config.block, "STEP": config.step, "GROUP": GROUP}  # fmt: skip
        signature = {
            name: "constexpr" if name in constants
            else f"*{dtype}" if name.endswith("_ptr")
            else "fp32" if name in floats
            else "i32"
            for name in _kernel.arg_names
        }  # fmt: skip
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
        done = triton.compile(
            ASTSource(_kernel, signature, constants, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": config.warps, "num_stages": config.stages},
        )
        ptx = done.asm["ptx"]
        print(json.dumps({
            "shared": done.metadata.shared,
            "wgmma": "wgmma.mma_async" in ptx,
            "ahead": bool(re.search(r"cp\.async\.cg.*0x10", ptx)),
            "narrow": len(re.findall(r"cp\.async\.ca|ld\.global(\.v2)?\.b16", ptx)),
        }))  # fmt: skip


if __name__ == "__main__":
    compile_for(int(sys.argv[1]), sys.argv[2])
