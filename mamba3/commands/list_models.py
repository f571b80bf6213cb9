"""list: the models that have a name."""

from __future__ import annotations

from mamba3.commands.arguments import command


def add(commands) -> None:
    add = command(commands, run, "mamba3 list 'mimo*'").add_argument
    add("pattern", nargs="?", default="*", help="shell pattern for the names (all)")


def run(args) -> None:
    """List the models that have a name: those that ship, and those on the Hugging Face Hub."""
    from mamba3 import zoo

    names = zoo.list_models(args.pattern)
    if not names:
        raise ValueError(f"no model has a name like {args.pattern!r}: `mamba3 list` shows all")
    for name in sorted(names, key=lambda name: not zoo.MODELS[name].is_shipped):
        model = zoo.MODELS[name]
        facts = [f"{model.parameters():,} parameters", model.licence]
        facts.append("ships with mamba3" if model.is_shipped else f"on the Hub: {model.repo_id}")
        print(f"{name}  {', '.join(filter(None, facts))}\n    {model.description}")
