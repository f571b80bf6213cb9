"""generate: text from a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mamba3.commands.arguments import QUICKSTART_MODEL, add_model, command
from mamba3.commands.loading import device_of, load

OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def add(commands) -> None:
    example = f'mamba3 generate --model {QUICKSTART_MODEL} "8+7=" "3-9="'
    add = command(commands, run, example).add_argument
    add_model(add)
    add_tokenizer(add)
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue; several make one batch")
    add("--file", metavar="F", help="prompts: a line each, or .jsonl rows with prompt or messages")
    add("--batch-size", type=int, default=16, metavar="N", help="prompts at a time (%(default)s)")
    add(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated"
    )
    add("--chat", action="store_true", help="prompts are a user's messages to a chat model")
    add("--system", metavar="TEXT", help="with --chat, what the system message says")
    add_sampling(add, max_new_tokens=64)
    add("--json", action="store_true", help="print each result as a line of JSON")


def add_tokenizer(add) -> None:
    """--tokenizer."""
    add(
        "--tokenizer",
        metavar="NAME_OR_PATH",
        help='a folder, file, Hub id or "bytes" (the tokenizer beside the model)',
    )


def add_sampling(add, *, max_new_tokens: int) -> None:
    """The options of generation."""
    add(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="most new tokens (%(default)s)",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample among the likeliest that make up P")
    add(
        "--min-p",
        type=float,
        metavar="P",
        help="drop tokens less likely than P times the likeliest",
    )
    add(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="1, the default, is none"
    )
    add("--seed", type=int, help="of the sampling")


def run(args) -> None:
    """Continue one prompt, shown as it comes, or several as a batch."""
    from mamba3 import zoo
    from mamba3.data.chat import render, turn_ends
    from mamba3.data.tokenizer import load_tokenizer
    from mamba3.generate_text import completions, prompt_ids

    rows = _rows(args)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    options = {name: getattr(args, name) for name in (*OPTIONS, "stop", "batch_size")}
    prompts = [
        tokenizer.encode(render(row, tokenizer, True))
        if isinstance(row, list)
        else prompt_ids(row, tokenizer)
        for row in rows
    ]
    if args.chat:
        say_if_plain(tokenizer)
        options["eos_token_id"], ends = turn_ends(tokenizer)
        options["stop"] = [*args.stop, *ends]
    model = load(zoo.resolve(args.model), device_of(args))
    # The answer to a message is shown alone, a continuation after what it continues.
    shown = ["" if args.chat else tokenizer.decode(ids) for ids in prompts]
    if len(prompts) == 1 and not args.json:
        # What is continued is shown with the first text, so after all arguments are checked.
        opening = iter(shown)
        options["stream"] = lambda _, piece: print(next(opening, "") + piece, end="", flush=True)
        list(completions(model, tokenizer, prompts, **options))
        print(next(opening, ""))
        return
    made = completions(model, tokenizer, prompts, **options)
    for row, text, completion in zip(rows, shown, made, strict=True):
        print(_json_line(row, completion) if args.json else text + completion.text, flush=True)


def say_if_plain(tokenizer) -> None:
    """Tell whose tokenizer has no chat template how conversations are laid out."""
    if tokenizer.chat_template is None:
        print(
            "mamba3: the tokenizer has no chat template; conversations are laid out plainly, as "
            "<|user|>, <|assistant|>, which a model must have been trained on",
            file=sys.stderr,
        )


def _json_line(row: str | list[dict], completion) -> str:
    result = {
        "messages" if isinstance(row, list) else "prompt": row,
        "completion": completion.text,
        "ended_by": completion.ended_by,
        "n_tokens": len(completion.ids),
    }
    return json.dumps(result, ensure_ascii=False)


def _rows(args) -> list[str | list[dict]]:
    """What to continue: texts, or with --chat conversations."""
    if bool(args.prompts) == (args.file is not None):
        raise ValueError("give prompts or --file, one of them")
    if args.system is not None and not args.chat:
        raise ValueError("--system needs --chat")
    rows = args.prompts or _read_file(Path(args.file), chat=args.chat)
    if not args.chat:
        return rows
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [
        [*opening, *([{"role": "user", "content": row}] if isinstance(row, str) else row)]
        for row in rows
    ]


def _read_file(path: Path, *, chat: bool) -> list[str | list[dict]]:
    """The prompts of a file: its lines, or the "prompt" or "messages" of its rows."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            rows.append(line)
            continue
        try:
            row = json.loads(line)
            rows.append(row["messages"] if chat and "messages" in row else row["prompt"])
        except (ValueError, TypeError, KeyError):
            rows.append(None)
        if not isinstance(rows[-1], list if chat and isinstance(rows[-1], list) else str):
            wanted = '"prompt", a string' + (', or "messages", a list' if chat else "")
            raise ValueError(f"{path}, line {number}: expected an object with {wanted}")
    if not rows:
        raise ValueError(f"{path} holds no prompt")
    return rows


def texts(model, tokenizer, prompts: list[str], **options) -> list[str]:
    """Prompts with their continuations."""
    from mamba3.generate_text import generate_text

    made = generate_text(model, tokenizer, prompts, **options)
    ids = map(tokenizer.encode_prompt, prompts)
    return [tokenizer.decode(row) + text for row, text in zip(ids, made, strict=True)]
