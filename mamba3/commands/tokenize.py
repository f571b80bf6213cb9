"""tokenize: texts to a token file."""

from __future__ import annotations

import json

from mamba3.commands.arguments import QUICKSTART_MODEL, add_json, command


def add(commands) -> None:
    example = f"mamba3 tokenize corpus.jsonl --out data/corpus --tokenizer {QUICKSTART_MODEL}"
    add = command(commands, run, example).add_argument
    add("inputs", nargs="+", metavar="INPUT", help=".jsonl, .parquet and text files, or folders")
    add("--out", required=True, metavar="FOLDER/NAME", help="writes NAME.bin, .idx and .json")
    add(
        "--tokenizer",
        required=True,
        metavar="PATH_OR_NAME",
        help="a tokenizer.json, a folder that holds one, or a name of `mamba3 list`",
    )
    add("--field", default="text", help="key or column that holds the text (%(default)s)")
    add("--lines", action="store_true", help="a line of a text file is a document, not the file")
    add("--end", metavar="TOKEN", help="what ends a document (eos_token of the tokenizer)")
    add("--skip-bad", action="store_true", help="leave out documents that cannot be used")
    add("--overwrite", action="store_true", help="replace the token file NAME")
    add_json(add)


def run(args) -> None:
    """Turn texts into a token file to train on."""
    from mamba3.data.sources import read_texts, source_files
    from mamba3.data.text import write_tokens
    from mamba3.data.text_tokenizer import load_text_tokenizer

    files = source_files(args.inputs)
    result = write_tokens(
        read_texts(files, field=args.field, lines=args.lines),
        load_text_tokenizer(args.tokenizer, end=args.end),
        args.out,
        on_error="skip" if args.skip_bad else "raise",
        overwrite=args.overwrite,
        n_bytes=sum(file.stat().st_size for file in files),
    )
    if args.json:
        print(json.dumps(result._asdict()))
        return
    print(f"{result.n_documents:,} documents, {result.n_tokens:,} tokens")
    print(f"saved to {result.path}.bin")
