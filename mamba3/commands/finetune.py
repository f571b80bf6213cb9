"""finetune: a skill from rows of a user's own."""

from __future__ import annotations

import json
import os
import shlex
import sys

from mamba3.commands.arguments import (
    QUICKSTART_MODEL,
    add_changes,
    add_json,
    add_model,
    command,
)

OPTIONS = (
    *("epochs", "steps", "lr", "batch_size", "seed", "valid_fraction", "tokenizer", "loss_on"),
    *("pack", "too_long", "mix", "mix_data", "lora_rank", "precision", "eval_every", "device"),
)


def add(commands) -> None:
    example = f"mamba3 finetune --model {QUICKSTART_MODEL} --data rows.jsonl --out my-model"
    add = command(commands, run, example).add_argument
    add_model(add)
    add(
        "--data",
        required=True,
        metavar="DATA",
        help="a .jsonl, .parquet or .txt file; a folder with train.* and valid.*; or org/name, a "
        "data set of the Hub. Rows have text, prompt and completion, or messages",
    )
    add("--out", metavar="DIR", help="folder for the new model (needed to train)")
    add_rows(add)
    add("--epochs", type=float, help="passes over the rows (as many as see 10,000, 1 to 20)")
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--lr", type=float, help="highest learning rate (by the model's width)")
    add("--batch-size", type=int, metavar="N", help="rows in a step (32)")
    add("--seed", type=int, help="of the order of the rows (0)")
    add("--precision", help="float32, bf16, fp16 or bf16-weights (float32)")
    add(
        "--lora-rank", type=int, metavar="R", help="train adapters of this rank alone (all weights)"
    )
    add("--eval-every", type=int, metavar="N", help="steps between evaluations (only the ends)")
    add_changes(add)
    add("--show-mask", type=int, metavar="N", help="print N rows, what is trained on marked; exit")
    add("--dry-run", action="store_true", help="tell rows, tokens, steps, memory, recipe; exit")
    add("--resume", action="store_true", help="continue the run in DIR from its last checkpoint")
    add("--overwrite", action="store_true", help="replace a model that is in DIR")
    add_json(add)


def add_rows(add) -> None:
    """What is made of the rows."""
    add("--valid-fraction", type=float, metavar="F", help="share kept for measuring (0.2)")
    add(
        "--columns",
        nargs="+",
        action="extend",
        default=[],
        metavar="OURS=THEIRS",
        help="keys of other names, as in prompt=question completion=answer",
    )
    add("--tokenizer", metavar="NAME_OR_PATH", help="another tokenizer (that of the model)")
    add("--loss-on", choices=["answers", "all"], help="tokens to train on (answers; of texts, all)")
    add("--pack", type=int, metavar="LENGTH", help="pack rows into rows of so many tokens")
    add("--too-long", choices=["cut", "drop"], help="what of rows longer than --pack (cut)")
    add("--mix", type=float, metavar="SHARE", help="share of old data, which keeps an old skill")
    add("--mix-data", metavar="DATA", help="the old data: rows, or 'arithmetic'; it is measured")


def run(args) -> None:
    """Teach a model what rows of your own say, and measure it before and after."""
    options = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    options["columns"] = dict(_pairs(args.columns, "prompt=question"))
    options["changes"] = _changes(args.set)
    if args.show_mask is not None or args.dry_run:
        _show(args, options)
        return
    if args.out is None:
        raise ValueError("--out DIR is needed: the folder for the new model")
    from mamba3.train import Stopped, finetune

    try:
        result = finetune(
            args.model,
            args.data,
            args.out,
            resume=args.resume,
            overwrite=args.overwrite,
            **options,
        )
    except Stopped as stopped:
        print(f"mamba3: {stopped}", file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from None
    if int(os.environ.get("RANK", 0)):  # which torchrun sets; all ranks have the same result
        return
    if args.json:
        print(json.dumps(result._asdict()))
        return
    _print(result)


def _print(result) -> None:
    print(f"{result.steps} steps on {result.n_train} rows, {result.seconds:.0f} s")
    _print_shares(
        f"exact match on {result.n_valid} other rows",
        result.exact_match_before,
        result.exact_match_after,
    )
    print(
        f"loss on {result.n_valid} other rows: before {result.eval_loss_before:.4g}, after "
        f"{result.eval_loss_after:.4g} nats a token"
    )
    _print_shares("old skill", result.old_before, result.old_after)
    print(f"saved to {result.out}")
    print(f"to the Hub: mamba3 push {shlex.quote(result.out)} ORG/NAME")


def _print_shares(what: str, before: float | None, after: float | None) -> None:
    from mamba3.eval.exact_match import percent

    if before is not None:
        print(f"{what}: before {percent(before)}, after {percent(after)}")


def _show(args, options) -> None:
    """What a run would train on, or do, without doing it."""
    from mamba3.train.finetune import finetune_recipe
    from mamba3.train.tasks.rows import PromptRows, mask_text

    recipe = finetune_recipe(args.model, args.data, **options)
    task = PromptRows(recipe)
    if args.show_mask is not None:
        for document in task.train_documents[: args.show_mask]:
            print(mask_text(document, task.tokenizer, colour=sys.stdout.isatty()))
        return
    from mamba3.train.estimate import estimate

    scored = sum(label >= 0 for document in task.train_documents for label in document.labels)
    n_tokens = sum(len(document.input_ids) for document in task.train_documents)
    told = {
        "rows": len(recipe.data.rows.train),
        "valid_rows": len(recipe.data.rows.valid),
        "tokens": n_tokens,
        "scored_tokens": scored,
        "steps": recipe.train.steps,
        "memory": estimate(recipe).total,
    }
    if args.json:
        print(json.dumps(told | {"recipe": recipe.to_dict()}))
        return
    print(f"data: {task.about}")
    print(f"{n_tokens:,} tokens, {scored:,} of them are trained on; {recipe.train.steps} steps")
    adapters = ", were all weights trained" if recipe.train.lora_rank else ""
    print(f"memory of the steps on a GPU{adapters}: {told['memory'] / 1e9:.2f} GB")
    print(f"\n{recipe.to_yaml()}", end="")


def _pairs(texts: list[str], example: str) -> list[tuple[str, str]]:
    """KEY=VALUE texts, taken apart."""
    for text in texts:
        if "=" not in text:
            raise ValueError(f"expected KEY=VALUE, such as {example}, got {text!r}")
    return [(key.strip(), value) for key, _, value in (text.partition("=") for text in texts)]


def _changes(texts: list[str]) -> dict:
    """Changes of --set; values are YAML."""
    import yaml

    try:
        return {key: yaml.safe_load(value) for key, value in _pairs(texts, "optim.lr=1e-3")}
    except yaml.YAMLError as error:
        raise ValueError(f"--set has a value that is not valid YAML: {error}") from None
