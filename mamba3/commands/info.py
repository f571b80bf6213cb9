"""info: what a model is."""

from __future__ import annotations

from pathlib import Path

from mamba3.commands.arguments import QUICKSTART_MODEL, add_changes, command
from mamba3.commands.printing import size


def add(commands) -> None:
    add = command(commands, run, f"mamba3 info {QUICKSTART_MODEL} --optimizer").add_argument
    add(
        "model",
        nargs="?",
        metavar="NAME_OR_PATH",
        help="of `mamba3 list`, a folder, or org/name on the Hub",
    )
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
    named = zoo.MODELS.get(args.model)
    if named is not None and not named.is_shipped and not Path(args.model).exists():
        _remote(named, args.optimizer)
        return
    folder = zoo.resolve(args.model)
    model = zoo.load_model(folder)
    if args.optimizer:
        _print_plan(model)
        return
    weights = list(model.parameters())
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    facts = {
        "folder": folder,
        "form": _form(model.config),
        "parameters": f"{sum(weight.numel() for weight in weights):,}",
        "weights": f"{size(sum(weight.nbytes for weight in weights))} ({', '.join(dtypes)})",
        "state": _state(model),
        "backend": ops.explain(),
    }
    _print_facts({**facts, **model.config.to_dict()})


def _remote(named, optimizer: bool) -> None:
    """A model on the Hub, by what is known of it: nothing is downloaded."""
    import torch

    from mamba3 import Mamba3LM
    from mamba3.checkpoint_files import CONFIG
    from mamba3.train.config import OptimRecipe, StepRecipe
    from mamba3.train.estimate import estimate_step

    config = named.config()
    model = Mamba3LM(config, device="meta", dtype=torch.bfloat16)
    if optimizer:
        _print_plan(model)
        return
    weights = sum(weight.nbytes for weight in model.parameters())
    how = StepRecipe(precision="bf16", recompute="full")
    training = estimate_step(config, 1, named.context, OptimRecipe(lr=1e-4), how).total
    sequence = sum(tensor.nbytes for tensor in _tensors(model.new_state(1)))
    facts = {
        "source": f"{named.source} (nothing was downloaded)",
        "files": f"{CONFIG}, {named.weights}" + (f" ({size(named.size)})" if named.size else ""),
        "form": _form(config),
        "parameters": f"{named.parameters():,}",
        "memory to run": f"{size(weights + sequence)} in bfloat16, and activations",
        "memory to train": f"{size(training)}, estimated: AdamW, bf16, full recomputation, one row "
        f"of {named.context} tokens",
        "state": _state(model),
        "licence": named.licence,
        "tokenizer": named.tokenizer,
        "context": f"{named.context} tokens in training",
        "citation": named.citation,
        "notes": " ".join(named.notes),
    }
    known = {name: value for name, value in facts.items() if value}
    _print_facts({**known, **config.to_dict()})


def _print_plan(model) -> None:
    from mamba3.optim import ParamGroupEngine

    print(ParamGroupEngine(model).plan())


def _print_facts(facts: dict) -> None:
    for name, value in facts.items():
        print(f"{name:24} {value}")


def _form(config) -> str:
    heads = f" of {config.n_heads} heads" if config.layers == "mamba3" else ""
    return f"{config.form}, {config.n_layer} layers{heads}"


def _state(model) -> str:
    held = sum(tensor.nbytes for tensor in _tensors(model.new_state(1)))
    return f"{size(held)} per sequence, whatever its length"


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
