"""Speed of the Mamba-1 layer on a GPU: checks the numbers, then times, then prints tables.

    python scripts/bench_mamba.py [--quick] [--json FILE]

scan    Whole sequences by the kernels, with softplus, skip and gate, d_inner 4096, N 16, bf16:
        forward, forward + backward, and the memory that takes beyond what was allocated before.
        The floor is the time this GPU takes to copy as many bytes as there are in x, dt, z and y,
        and for the backward pass their gradients: what must be read and written once.
layer   The whole mixer, d_model 2048, against transformers' MambaMixer with the same weights: its
        loop over tokens, and as far as it and mambapy can be imported its parallel scans.
token   One token for 128 sequences, as a CUDA graph; transformers' step runs as it is called.

Times are medians of device events around whole calls, launches included; of layers, on the clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from pathlib import Path

import torch
from bench_gpu import error, extra_mb, graph_ms, median_ms
from torch import Tensor

from mamba3.layers import TMambaLayer
from mamba3.ops import causal_conv, selective_scan, use_backend

D_MODEL, D_INNER, D_STATE, SEQUENCES = 2048, 4096, 16, 128
SHAPES = ((1, 2048), (1, 16384), (8, 2048))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="no peers")
    parser.add_argument("--peers", nargs="+", help="only these: loop, mambapy, associative_scan")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_mamba.py needs a CUDA or ROCm GPU, and found none")
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(", ".join(results.values()), flush=True)
    check_scan()
    results["scan"] = [scan_row(*shape) for shape in SHAPES]
    table(results["scan"])
    results["layer"] = layer_rows(args.quick, args.peers)
    table(results["layer"])
    results["token"] = token_rows(args.quick)
    table(results["token"])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


def scan_tensors(batch: int, length: int) -> dict[str, Tensor]:
    """Random arguments of `selective_scan`, x and z as rows of one projection."""

    def normal(*shape):
        return torch.randn(shape, device="cuda").bfloat16()

    x, z = normal(batch, length, 2 * D_INNER).chunk(2, -1)
    tensors = {
        "x": x, "dt": normal(batch, length, D_INNER) - 3, "z": z,
        "a": -torch.arange(1.0, D_STATE + 1, device="cuda").repeat(D_INNER, 1),
        "b": normal(batch, length, D_STATE), "c": normal(batch, length, D_STATE),
        "d": torch.ones(D_INNER, device="cuda"),
    }  # fmt: skip
    return {name: t.detach().requires_grad_() for name, t in tensors.items()}


def check_scan() -> None:
    """Errors against the torch path in float64; exits where rounding does not explain one."""
    tensors = scan_tensors(2, 200)
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    y, _ = selective_scan(**tensors, softplus=True)
    grad = torch.randn_like(y)
    grads = torch.autograd.grad(y, list(tensors.values()), grad)
    with use_backend("torch"):
        expected, _ = selective_scan(**wide, softplus=True)
    wanted = torch.autograd.grad(expected, list(wide.values()), grad.double())
    errors = {"output": error(y, expected)}
    errors |= {
        f"gradient of {name}": error(got, true)
        for name, got, true in zip(tensors, grads, wanted, strict=True)
    }
    worst = max(errors, key=errors.get)
    print(f"scan against float64: output {errors['output']:.1e}, {worst} {errors[worst]:.1e}")
    if not (errors["output"] < 5e-3 and errors[worst] < 1e-2):
        raise SystemExit("more than rounding explains; not timing it: see mamba3 doctor")


def copy_ms(nbytes: int) -> float:
    """Milliseconds that reading and writing `nbytes` in all takes."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return median_ms(lambda: target.copy_(source), 20)


def scan_row(batch: int, length: int) -> dict:
    tensors = scan_tensors(batch, length)
    leaves, given = list(tensors.values()), {name: t.detach() for name, t in tensors.items()}
    tile = 2 * batch * length * D_INNER

    def forward():
        return selective_scan(**given, softplus=True)[0]

    grad = torch.randn_like(forward())

    def both():
        y, _ = selective_scan(**tensors, softplus=True)
        torch.autograd.grad(y, leaves, grad)

    row = {"scan": f"B{batch} L{length}", "forward ms": median_ms(forward, 20)}
    row["floor ms"] = copy_ms(4 * tile)
    row["fwd+bwd ms"] = median_ms(both, 20)
    row["its floor ms"] = copy_ms(11 * tile)
    row["extra MB"] = extra_mb(both)
    row["inputs + outputs MB"] = 4 * tile / 2**20
    x, weight = given["x"], torch.randn(D_INNER, 4, device="cuda")
    row["conv ms"] = median_ms(lambda: causal_conv(x, weight), 20)
    row["its copy ms"] = copy_ms(2 * tile)
    return row


# whole layers


def peers() -> dict[str, dict]:
    """Options of transformers' MambaConfig by the name of the path they choose."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    from transformers import MambaConfig

    found = {"transformers, loop": {"use_mambapy": False}}
    if importlib.util.find_spec("mambapy") is not None:
        found["transformers, mambapy"] = {"use_mambapy": True}
    if hasattr(MambaConfig(), "use_associative_scan"):
        for options in found.values():
            options["use_associative_scan"] = False
        found["transformers, associative_scan"] = {"use_associative_scan": True}
    return found


def peer(options: dict, layer: TMambaLayer):
    """Their mixer with our weights."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=D_MODEL, state_size=D_STATE, num_hidden_layers=1, **options)
    mixer = MambaMixer(config, layer_idx=0).to("cuda", torch.bfloat16)
    mixer.load_state_dict(layer.state_dict())
    # mambapy's scan gives float32, which a bfloat16 projection takes in autocast alone.
    return InAutocast(mixer) if options.get("use_mambapy") else mixer


class InAutocast(torch.nn.Module):
    """A module whose forward runs in autocast."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, u: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.module(u)


def layer_rows(quick: bool, only: list[str] | None) -> list[dict]:
    torch.manual_seed(0)
    layer = TMambaLayer(D_MODEL, device="cuda", dtype=torch.bfloat16)
    u = torch.randn(8, 2048, D_MODEL, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(u)
    found = [times("mamba3", layer, u)]
    for name, options in {} if quick else peers().items():
        if only is not None and name.split(", ")[1] not in only:
            continue
        try:
            mixer = peer(options, layer)
            with torch.no_grad():
                off = error(mixer(u), expected)
            print(f"{name}: output differs from ours by {off:.1e}", flush=True)
            found.append(times(name, mixer, u, repeats=2))
        except Exception as problem:  # of a peer: said, and not timed
            print(f"{name} does not run here: {str(problem).splitlines()[0][:120]}")
    for row in found:
        row["over ours"] = row["fwd+bwd ms"] / found[0]["fwd+bwd ms"]
    return found


def times(name: str, layer, u: Tensor, repeats: int = 20) -> dict:
    """A layer's times; few repeats for what takes seconds."""
    grad = torch.randn_like(u)

    def median(function) -> float:
        function()
        torch.cuda.synchronize()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            function()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return 1000 * statistics.median(seconds)

    def both():
        layer(u).backward(grad)

    row = {"layer, B8 L2048": name}
    with torch.no_grad():
        layer.eval()
        row["forward ms"] = median(lambda: layer(u))
    layer.train()
    row["fwd+bwd ms"] = median(both)
    row["extra MB"] = extra_mb(both)
    return row


@torch.inference_mode()
def token_rows(quick: bool) -> list[dict]:
    layer = TMambaLayer(D_MODEL, device="cuda", dtype=torch.bfloat16)
    state = layer.new_state(SEQUENCES)
    u = torch.randn(SEQUENCES, D_MODEL, device="cuda", dtype=torch.bfloat16)
    row = {"token, B128": "mamba3", "ms": graph_ms(lambda: layer.step(u, state, inplace=True))}
    row["copy of the state ms"] = copy_ms(2 * sum(t.nbytes for t in state))
    rows = [row]
    if not quick and peers():
        from transformers import DynamicCache, MambaConfig

        mixer = peer({"use_mambapy": False}, layer).eval()
        config = MambaConfig(hidden_size=D_MODEL, state_size=D_STATE, num_hidden_layers=1)
        try:
            cache = DynamicCache(config=config)
            step = u.unsqueeze(1)
            mixer(step.repeat(1, 4, 1), cache)
            rows.append(
                {"token, B128": "transformers", "ms": median_ms(lambda: mixer(step, cache), 20)}
            )
        except Exception as problem:  # of a peer: said, and not timed
            print(f"transformers' step does not run here: {str(problem).splitlines()[0][:120]}")
    return rows


def table(rows: list[dict]) -> None:
    """Rows under the names of their columns."""
    first, *names = rows[0]
    print(f"\n{first:30}" + "".join(f"{name:>{max(10, len(name)) + 2}}" for name in names))
    for row in rows:
        cells = (f"{row[name]:.3f}" if name in row else "-" for name in names)
        widths = (max(10, len(name)) + 2 for name in names)
        print(f"{row[first]:30}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    print(flush=True)


if __name__ == "__main__":
    main()
