"""list: the models that ship."""

from __future__ import annotations

from mamba3.commands.arguments import command


def add(commands) -> None:
    command(commands, run, "mamba3 list")


def run(args) -> None:
    """List the models that ship with the package."""
    from mamba3 import zoo

    for name in zoo.list_models():
        model = zoo.MODELS[name]
        print(
            f"{name}  {model.parameters():,} parameters, {model.licence}\n    {model.description}"
        )
