"""finetune: a skill from prompt/completion rows."""

from __future__ import annotations

import json

from mamba3.commands.arguments import QUICKSTART_MODEL, add_json, add_model, command


def add(commands) -> None:
    example = f"mamba3 finetune --model {QUICKSTART_MODEL} --data rows.jsonl --out my-model"
    add = command(commands, run, example).add_argument
    add_model(add)
    add(
        "--data",
        required=True,
        metavar="FILE.jsonl",
        help='{"prompt": ..., "completion": ...} a line',
    )
    add("--out", required=True, metavar="DIR", help="folder for the new model")
    add("--epochs", type=float, help="passes over the rows (20)")
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--lr", type=float, help="highest learning rate (by the model's width)")
    add("--batch-size", type=int, metavar="N", help="rows in a step (32)")
    add("--seed", type=int, help="of the order of the rows (0)")
    add("--valid-fraction", type=float, metavar="F", help="share kept for measuring (0.2)")
    add(
        "--lora-rank", type=int, metavar="R", help="train adapters of this rank alone (all weights)"
    )
    add("--overwrite", action="store_true", help="replace a model that is in DIR")
    add_json(add)


def run(args) -> None:
    """Teach a model a skill from prompt/completion rows, and measure it before and after."""
    from mamba3.eval.exact_match import percent
    from mamba3.train import finetune

    names = ["epochs", "steps", "lr", "batch_size", "seed", "valid_fraction", "lora_rank", "device"]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    result = finetune(args.model, args.data, args.out, overwrite=args.overwrite, **given)
    if args.json:
        print(json.dumps(result._asdict()))
        return
    print(f"{result.steps} steps on {result.n_train} rows, {result.seconds:.0f} s")
    print(
        f"exact match on {result.n_valid} other rows: before "
        f"{percent(result.exact_match_before)}, after {percent(result.exact_match_after)}"
    )
    print(f"saved to {result.out}")
