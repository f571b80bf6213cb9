"""convert: a checkpoint in the form of another package."""

from __future__ import annotations

import json

from mamba3.commands.arguments import QUICKSTART_MODEL, add_json, command

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add(commands) -> None:
    example = f"mamba3 convert {QUICKSTART_MODEL} converted --to mamba_ssm"
    add = command(commands, run, example).add_argument
    add("source", metavar="SRC", help="a name of `mamba3 list`, or a folder of any of the forms")
    add("destination", metavar="DST", help="the folder to write")
    add(
        "--to",
        required=True,
        choices=("mamba_ssm", "mamba3", "fla", "transformers"),
        help="the official form, ours, or that of flash-linear-attention or transformers",
    )
    add("--dtype", choices=DTYPES, help="of the weights (as they are)")
    add(
        "--a-activation",
        choices=("heavy_tail", "softplus"),
        help="what the weights were trained with, where the source does not say",
    )
    add("--overwrite", action="store_true", help="replace a checkpoint in DST")
    add_json(add)


def run(args) -> None:
    """Write a checkpoint in the form of another package, checked by loading it again."""
    import torch

    from mamba3.convert import convert

    done = convert(
        args.source,
        args.destination,
        to=args.to,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        a_activation=args.a_activation,
        overwrite=args.overwrite,
    )
    dtype = str(done.dtype).removeprefix("torch.")
    if args.json:
        paths = {"source": str(done.source), "destination": str(done.destination)}
        print(json.dumps({**done._asdict(), **paths, "dtype": dtype}))
        return
    print(f"{done.source} ({done.source_form}) to {done.destination} ({done.form})")
    print(f"{done.n_parameters:,} parameters, {dtype}; wrote {', '.join(done.files)}")
    print(
        "loaded again: every tensor as it was written; logits on random ids differ from the "
        f"source's by {done.difference:.2g} (RMS)"
    )
