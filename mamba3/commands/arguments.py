"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable

QUICKSTART_MODEL = "arithmetic-tiny"


def command(commands, run: Callable, example: str) -> argparse.ArgumentParser:
    """A sub-parser for the command that an example shows, described as its function is."""
    parser = commands.add_parser(
        example.split()[1],
        help=run.__doc__,
        description=run.__doc__,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def add_model(add: Callable) -> None:
    """--model and --device."""
    add(
        "--model",
        required=True,
        metavar="NAME_OR_PATH",
        help="a name of `mamba3 list`, a folder, or org/name on the Hub",
    )
    add("--device", help="cpu, cuda, ... (a GPU if there is one)")


def add_recipe(add: Callable) -> None:
    """A recipe, and changes to it."""
    add("recipe", help="a YAML file with the groups model, data, optim, step and train")
    add_changes(add)


def add_changes(add: Callable) -> None:
    """--set: changes to a recipe."""
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change the recipe",
    )


def add_json(add: Callable) -> None:
    """--json."""
    add("--json", action="store_true", help="print the result as one JSON object")
