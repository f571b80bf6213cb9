"""info: what a model is."""

from __future__ import annotations

from mamba3.commands.arguments import QUICKSTART_MODEL, add_changes, command
from mamba3.commands.printing import size


def add(commands) -> None:
    add = command(commands, run, f"mamba3 info {QUICKSTART_MODEL} --optimizer").add_argument
    add("model", nargs="?", metavar="NAME_OR_PATH", help="a name of `mamba3 list`, or a folder")
    add(
        "--optimizer",
        action="store_true",
        help="show which rule of the hybrid optimizer trains which parameter",
    )
    add(
        "--memory",
        action="store_true",
        help="show what a step of the recipe --config takes on a GPU; none is needed",
    )
    add("--config", metavar="RECIPE.yaml", help="for --memory, in the place of NAME_OR_PATH")
    add("--fit", type=float, metavar="GB", help="for --memory: also the largest batch for so much")
    add_changes(add)


def run(args) -> None:
    """Show a model's architecture, its size in memory, and what it would run on."""
    if args.memory:
        _memory(args)
        return
    from mamba3 import ops, zoo

    if args.model is None:
        raise ValueError("info needs NAME_OR_PATH, or --memory --config RECIPE.yaml")
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


def _memory(args) -> None:
    if args.config is None or args.model is not None:
        raise ValueError("--memory takes a recipe, --config RECIPE.yaml, and no NAME_OR_PATH")
    from mamba3.train import load_recipe
    from mamba3.train.estimate import estimate, rows_that_fit

    recipe = load_recipe(args.config, args.set)
    print(estimate(recipe))
    if args.fit is not None:
        rows = rows_that_fit(recipe, int(args.fit * 1e9))
        print(f"A data.batch_size of {rows} is the largest that takes at most {args.fit:g} GB.")


def _tensors(state) -> list:
    """All tensors of a state, which is made of nested tuples."""
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in _tensors(part)]
    return [state]
