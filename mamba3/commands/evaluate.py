"""eval: exact match of a model, its perplexity on texts, and its loss by position."""

from __future__ import annotations

import json
from pathlib import Path

from mamba3.commands.arguments import QUICKSTART_MODEL, add_json, command
from mamba3.commands.loading import device_of, load
from mamba3.commands.printing import print_shares

# Share of the problems of a card that are measured unless all are asked for.
QUICK = 0.1


def add(commands) -> None:
    example = f"mamba3 eval --model {QUICKSTART_MODEL} --n 400"
    parser = command(commands, run, example)
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help="a name of `mamba3 list`, or a folder")
    add("--model", metavar="NAME_OR_PATH", help="the same")
    add("--device", help="cpu, cuda, ... (a GPU if there is one)")
    add_json(add)

    add = parser.add_argument_group("exact match of greedy answers").add_argument
    add("--data", metavar="FILE.jsonl", help="rows to measure on (the arithmetic curriculum)")
    add("--n", type=int, help="rows of the file (all), or problems of each stage (2000)")
    add(
        "--stages",
        type=int,
        nargs="+",
        metavar="STAGE",
        help="stages of the curriculum (those of the model's recipe, or all)",
    )
    add(
        "--sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="digits (stages 4 and 5) or symbols (stage 6) of problems (those of the recipe)",
    )
    add(
        "--full",
        action="store_true",
        help="as many problems as the model's card (a tenth), where it comes with numbers",
    )

    add = parser.add_argument_group("perplexity and loss by position").add_argument
    add(
        "--perplexity",
        metavar="FILE",
        help="measure it on a .jsonl, .parquet or text file, or a token file NAME.bin",
    )
    add(
        "--long-context",
        type=int,
        metavar="LENGTH",
        help="also the loss by position, in windows of so many tokens",
    )
    add("--bucket", type=int, metavar="N", help="positions of a bucket (0-128, then doubling)")
    add("--length", type=int, default=2048, help="tokens seen at once (%(default)s)")
    add("--batch-size", type=int, default=8, help="windows run at once (%(default)s)")
    add("--tokenizer", metavar="PATH_OR_NAME", help="where the model's folder has none")
    add("--end", metavar="TOKEN", help="what ends a text (eos_token of the tokenizer)")
    add("--field", default="text", help="key or column that holds the text (%(default)s)")
    add("--lines", action="store_true", help="a line of a text file is a document, not the file")


def run(args) -> None:
    """Measure exact match of greedy answers, beside a card's numbers, or perplexity on texts."""
    from mamba3 import zoo
    from mamba3.eval.skill import read_record

    names = [name for name in (args.name, args.model) if name is not None]
    if len(names) != 1:
        raise ValueError(f"eval takes one model, got {' and '.join(names) or 'none'}")
    folder = zoo.resolve(names[0])
    others = args.data or args.n is not None or args.stages or args.sizes
    if args.perplexity is not None:
        if others or args.full:
            raise ValueError(
                "--perplexity goes with none of --data, --n and --stages, nor with --full"
            )
        _perplexity(args, folder)
        return
    if args.long_context is not None:
        raise ValueError("--long-context needs texts: --perplexity FILE")
    record = None if others else read_record(folder)
    if record is not None:
        _reproduce(args, folder, record)
    elif args.full:
        raise ValueError(
            "--full is for a model with an eval.json, and goes with none of --data, --n, --stages "
            "and --sizes"
        )
    else:
        _exact_match(args, folder)


def _exact_match(args, folder: Path) -> None:
    from mamba3.data import arithmetic
    from mamba3.data.jsonl import read_rows
    from mamba3.data.tokenizer import load_tokenizer
    from mamba3.eval.exact_match import exact_match, percent
    from mamba3.train.config import DataRecipe
    from mamba3.train.run import trained_on

    if args.n is not None and args.n < 1:
        raise ValueError(f"--n must be at least 1, got {args.n}")
    tokenizer = load_tokenizer(folder)
    if args.data:
        problems = read_rows(args.data, tokenizer)[: args.n]
    else:
        data = trained_on(folder) or DataRecipe(stages=list(arithmetic.STAGES))
        problems = [
            problem
            for stage in args.stages or data.stages
            for problem in arithmetic.eval_problems(
                stage,
                args.n or 2000,
                options=data.problems,
                sizes=args.sizes or data.eval_sizes(stage),
            )
        ]
    model = load(folder, device_of(args))
    result = exact_match(model, tokenizer, problems, chance=arithmetic.CHANCE)
    if args.json:
        values = result._asdict()
        misses = [miss._asdict() for miss in values.pop("misses")]
        print(json.dumps({"exact_match": values.pop("overall"), **values, "misses": misses}))
        return
    print_shares(result.per_task, result.overall, result.n)
    for task, scaled in result.scaled.items():
        print(f"    {task}, scaled by what guessing gets right: {percent(scaled)}")
    for group, share in result.per_group.items() if args.sizes else ():
        print(f"    {group:24} {percent(share):>8} of {result.n_per_group[group]:,}")
    for miss in result.misses:
        print(f"wrong: {miss.prompt!r} gave {miss.got!r}, expected {miss.answer!r}")
    if result.truncated:
        print(f"{result.truncated} answers had not ended when they were as long as the longest")


def _reproduce(args, folder: Path, record: dict) -> None:
    """Measure each row of the model's eval.json anew, and say where the two differ."""
    from mamba3.eval.exact_match import percent
    from mamba3.eval.skill import differing, measured_again, numbers
    from mamba3.solve import Skill

    skill = Skill.of(folder)
    model = skill.load(device_of(args))
    if not args.json:
        n = "all problems of the card" if args.full else "a tenth of the card's (--full: all)"
        print(f"{n}; recorded {record['date']} on {record['device']}")
    share, pairs = 1.0 if args.full else QUICK, []
    for pair in measured_again(model, skill.tokenizer, skill.data, record, share=share):
        pairs.append(pair)
        if not args.json:
            _print_row(*pair)
    found = [number for pair in pairs for number in numbers(*pair)]
    differs = differing(found)
    if args.json:
        rows = [{"measured": new, "recorded": old} for new, old in pairs]
        print(json.dumps({"rows": rows, "differs": [number._asdict() for number in differs]}))
        return
    for number in differs:
        print(
            f"DIFFERS: {number.row}, {number.name}: {percent(number.share)} of {number.n:,}, "
            f"recorded {percent(number.recorded)} of {number.recorded_n:,}"
        )
    if not differs:
        print(f"none of {len(found)} numbers differs by more than chance explains")


def _print_row(new: dict, old: dict) -> None:
    """What was measured of a row beside what was recorded."""
    from mamba3.eval.exact_match import percent
    from mamba3.eval.skill import Row, numbers

    title = Row(old["stage"], old["n"], old["sizes"]).title
    parts = [f"loss {new['loss']:.2g} (recorded {old['loss']:.2g})"]
    parts += [f"{new[what]} ({old[what]}) {what}" for what in ("truncated", "malformed")]
    print(f"{title}: {', '.join(parts)}", flush=True)
    for number in numbers(new, old):
        print(
            f"    {number.name:26} {percent(number.share):>9} of {number.n:<6,}  recorded "
            f"{percent(number.recorded):>9} of {number.recorded_n:,}"
        )
    for task, scaled in new["scaled"].items():
        name, before = f"{task}, scaled", percent(old["scaled"][task])
        print(f"    {name:26} {percent(scaled):>9}            recorded {before:>9}")


def _perplexity(args, folder: Path) -> None:
    from mamba3.data.text import ENDINGS
    from mamba3.data.text_tokenizer import load_text_tokenizer
    from mamba3.eval.long_context import doubling_edges, even_edges, long_context
    from mamba3.eval.perplexity import read_documents, text_perplexity

    tokenizer = None
    if Path(args.perplexity).suffix not in ENDINGS:
        tokenizer = load_text_tokenizer(args.tokenizer or folder, end=args.end)

    def documents():
        return read_documents(args.perplexity, tokenizer, field=args.field, lines=args.lines)

    model = load(folder, device_of(args))
    told = text_perplexity(model, documents(), length=args.length, batch_size=args.batch_size)
    curve = None
    if (length := args.long_context) is not None:
        edges = even_edges(length, args.bucket) if args.bucket else doubling_edges(length)
        curve = long_context(model, documents(), length, edges=edges)
    if args.json:
        values = {**told._asdict(), "length": args.length}
        if curve is not None:
            buckets = [bucket._asdict() for bucket in curve.buckets]
            values["long_context"] = {**curve._asdict(), "buckets": buckets}
        print(json.dumps(values))
        return
    _print_perplexity(told)
    if curve is not None:
        _print_curve(curve)


def _print_perplexity(told) -> None:
    n_bytes = "" if told.n_bytes is None else f", {told.n_bytes:,} bytes"
    print(f"{told.n_documents:,} documents, {told.n_tokens:,} tokens{n_bytes}")
    print(f"loss             {told.loss:.4f} nats a token")
    print(f"perplexity       {told.perplexity:.4f} a token")
    if told.bits_per_byte is not None:
        print(f"bits per byte    {told.bits_per_byte:.4f}")
        print(f"byte perplexity  {told.byte_perplexity:.4f}")


def _print_curve(curve) -> None:
    print(f"\n{curve.n_windows:,} windows of {curve.length:,} tokens; "
          f"{curve.n_left_out:,} documents are shorter and were left out")  # fmt: skip
    print(f"{'positions':>17}  {'loss':>9}  {'perplexity':>11}  {'tokens':>10}")
    for first, last, loss, perplexity, n_tokens in curve.buckets:
        print(f"{f'{first}-{last}':>17}  {loss:9.4f}  {perplexity:11.4f}  {n_tokens:10,}")
