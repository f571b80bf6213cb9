"""info: what a model is."""

from __future__ import annotations

from mamba3.commands.arguments import QUICKSTART_MODEL, command
from mamba3.commands.printing import size


def add(commands) -> None:
    add = command(commands, run, f"mamba3 info {QUICKSTART_MODEL} --optimizer").add_argument
    add("model", metavar="NAME_OR_PATH", help="a name of `mamba3 list`, or a folder")
    add(
        "--optimizer",
        action="store_true",
        help="show which rule of the hybrid optimizer trains which parameter",
    )


def run(args) -> None:
    """Show a model's architecture, its size in memory, and what it would run on."""
    from mamba3 import ops, zoo

    folder = zoo.resolve(args.model)
    model = zoo.load_model(folder)
    if args.optimizer:
        from mamba3.optim import ParamGroupEngine

        print(ParamGroupEngine(model).plan())
        return
    config = model.config
    weights = list(model.parameters())
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    state = sum(tensor.nbytes for tensor in _tensors(model.new_state(1)))
    form = f"MIMO, rank {config.mimo_rank}" if config.is_mimo else "SISO"
    facts = {
        "folder": folder,
        "form": f"{form}, {config.n_layer} layers of {config.n_heads} heads",
        "parameters": f"{sum(weight.numel() for weight in weights):,}",
        "weights": f"{size(sum(weight.nbytes for weight in weights))} ({', '.join(dtypes)})",
        "state": f"{size(state)} per sequence, whatever its length",
        "backend": ops.explain(),
    }
    for name, value in {**facts, **config.to_dict()}.items():
        print(f"{name:24} {value}")


def _tensors(state) -> list:
    """All tensors of a state, which is made of nested tuples."""
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in _tensors(part)]
    return [state]
