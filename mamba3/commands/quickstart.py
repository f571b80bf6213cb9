"""quickstart: the tour of what the package does."""

from __future__ import annotations

import shlex
from pathlib import Path

from mamba3.commands.arguments import QUICKSTART_MODEL, command
from mamba3.commands.generate import texts
from mamba3.commands.loading import load


def add(commands) -> None:
    add = command(commands, run, "mamba3 quickstart --out my-first-model").add_argument
    add("--out", default="mamba3-quickstart", help="folder for the new model (%(default)s)")


def run(args) -> None:
    """Answer, fine-tune, save and reload, with the model that ships: under two minutes."""
    from mamba3 import zoo
    from mamba3.data.arithmetic import SKILL_FILE
    from mamba3.data.jsonl import read_rows, split_rows
    from mamba3.data.tokenizer import load_tokenizer
    from mamba3.eval.exact_match import exact_match, percent
    from mamba3.train import finetune

    # Its own path, since a folder of this name where the user stands would make it ambiguous.
    shipped = zoo.MODELS[QUICKSTART_MODEL].path
    out = Path(args.out)
    tokenizer = load_tokenizer(shipped)
    _, held_out = split_rows(read_rows(SKILL_FILE, tokenizer), valid_fraction=0.2)
    unsorted = [problem.prompt for problem in held_out if problem.answer not in problem.prompt]
    skill = sorted(unsorted, key=len)[-3:]

    print(f"1. {QUICKSTART_MODEL} answers what it was trained on:")
    model = load(shipped)
    _print_answers(model, tokenizer, ["8+7", "3-9", "r1203", "s1299", "57?64"])
    print("   It has never seen the digits of a number sorted:")
    _print_answers(model, tokenizer, skill)

    print(f"\n2. Fine-tuning it on {SKILL_FILE.name} ...", flush=True)
    result = finetune(shipped, SKILL_FILE, out, valid_fraction=0.2, overwrite=is_quickstart(out))
    print(f"   {result.steps} steps in {result.seconds:.0f} s, saved to {out}")

    print(f"\n3. Reloaded from {out}:")
    model = load(out.absolute())
    _print_answers(model, tokenizer, skill)
    reloaded = exact_match(model, tokenizer, held_out).overall
    print(f"   exact match on {len(held_out)} rows that it was not trained on:")
    print(f"   before {percent(result.exact_match_before)}, after {percent(reloaded)}")

    print("\nNext, ask it yourself:")
    print(f"   mamba3 generate --model {shlex.quote(args.out)} x90210")
    print('or teach it rows of your own, {"prompt": "12+7", "completion": "19"} a line:')
    print(f"   mamba3 finetune --model {QUICKSTART_MODEL} --data FILE.jsonl --out my-model")


def is_quickstart(out: Path) -> bool:
    """Whether a folder holds the result of an earlier quickstart, which may be replaced."""
    from mamba3.data.arithmetic import SKILL_FILE

    card = out / "README.md"
    return card.is_file() and SKILL_FILE.name in card.read_text(encoding="utf-8")


def _print_answers(model, tokenizer, prompts: list[str]) -> None:
    for text in texts(model, tokenizer, prompts, max_new_tokens=16):
        print(f"      {text}")
