"""The command line: `mamba3 ...`, the same as `python -m mamba3 ...`.

One function a command. The library does the work and is imported when a command runs, so that
`mamba3 --help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from mamba3 import __version__

QUICKSTART_MODEL = "arithmetic-tiny"
GENERATE_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
GENERATE_OPTIONS += ("repetition_penalty", "seed")


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0, 2 after an error, 130 after Ctrl-C, and 128 + the signal's number after
        training that a signal stopped, with its state saved: 130 or 143.
    """
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="mamba3: %(message)s")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            args.run(args)
        except KeyboardInterrupt:
            print("mamba3: interrupted", file=sys.stderr)
            return 130
        # What the library raises for its users; other errors are faults and keep their traceback.
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            if args.debug:
                raise
            print(f"mamba3: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `run` of its result is the function of the command given."""
    parser = argparse.ArgumentParser(
        prog="mamba3",
        description="Mamba-3 for PyTorch: generate, train, fine-tune, evaluate.",
        epilog="start with:\n  mamba3 quickstart",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"mamba3 {__version__} (torch {metadata.version('torch')})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in (
        _add_quickstart,
        _add_generate,
        _add_train,
        _add_profile,
        _add_finetune,
        _add_tokenize,
        _add_eval,
        _add_info,
        _add_list,
        _add_doctor,
    ):
        add_command(commands)
    return parser


def _command(commands, run: Callable, example: str) -> argparse.ArgumentParser:
    """A sub-parser named and described after its function."""
    parser = commands.add_parser(
        run.__name__.lstrip("_"),
        help=run.__doc__,
        description=run.__doc__,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def _add_model(add: Callable) -> None:
    add(
        "--model",
        required=True,
        metavar="NAME_OR_PATH",
        help="a name of `mamba3 list`, or a folder",
    )
    add("--device", help="cpu, cuda, ... (a GPU if there is one)")


def _load(folder: Path, device: str | None = None):
    """A model for this process, with no more threads than it is worth."""
    import torch

    from mamba3 import zoo
    from mamba3.threads import worthwhile_threads

    model = zoo.load_model(folder, device=device)
    torch.set_num_threads(worthwhile_threads(model))
    return model


def _add_recipe(add: Callable) -> None:
    add("recipe", help="a YAML file with the groups model, data, optim, step and train")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change the recipe",
    )


def _add_json(add: Callable) -> None:
    add("--json", action="store_true", help="print the result as one JSON object")


# quickstart


def _add_quickstart(commands) -> None:
    add = _command(commands, _quickstart, "mamba3 quickstart --out my-first-model").add_argument
    add("--out", default="mamba3-quickstart", help="folder for the new model (%(default)s)")


def _quickstart(args) -> None:
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
    model = _load(shipped)
    _print_answers(model, tokenizer, ["8+7", "3-9", "r1203", "s1299", "57?64"])
    print("   It has never seen the digits of a number sorted:")
    _print_answers(model, tokenizer, skill)

    print(f"\n2. Fine-tuning it on {SKILL_FILE.name} ...", flush=True)
    result = finetune(shipped, SKILL_FILE, out, valid_fraction=0.2, overwrite=_is_quickstart(out))
    print(f"   {result.steps} steps in {result.seconds:.0f} s, saved to {out}")

    print(f"\n3. Reloaded from {out}:")
    model = _load(out.absolute())
    _print_answers(model, tokenizer, skill)
    reloaded = exact_match(model, tokenizer, held_out).overall
    print(f"   exact match on {len(held_out)} rows that it was not trained on:")
    print(f"   before {percent(result.exact_match_before)}, after {percent(reloaded)}")

    print("\nNext, ask it yourself:")
    print(f"   mamba3 generate --model {shlex.quote(args.out)} x90210")
    print('or teach it rows of your own, {"prompt": "12+7", "completion": "19"} a line:')
    print(f"   mamba3 finetune --model {QUICKSTART_MODEL} --data FILE.jsonl --out my-model")


def _is_quickstart(out: Path) -> bool:
    """Whether a folder holds the result of an earlier quickstart, which may be replaced."""
    from mamba3.data.arithmetic import SKILL_FILE

    card = out / "README.md"
    return card.is_file() and SKILL_FILE.name in card.read_text(encoding="utf-8")


def _print_answers(model, tokenizer, prompts: list[str]) -> None:
    for text in _texts(model, tokenizer, prompts, max_new_tokens=16):
        print(f"      {text}")


# generate


def _add_generate(commands) -> None:
    example = f'mamba3 generate --model {QUICKSTART_MODEL} "8+7=" "3-9="'
    add = _command(commands, _generate, example).add_argument
    _add_model(add)
    add("prompts", nargs="+", metavar="PROMPT", help="text to continue; several make one batch")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="most new tokens (%(default)s)")
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


def _generate(args) -> None:
    """Continue one prompt, shown as it comes, or several as a batch."""
    from mamba3 import zoo
    from mamba3.data.tokenizer import load_tokenizer

    folder = zoo.resolve(args.model)
    tokenizer = load_tokenizer(folder)
    model = _load(folder, _device(args))
    options = {name: getattr(args, name) for name in GENERATE_OPTIONS}
    if len(args.prompts) == 1:
        _print_stream(model, tokenizer, args.prompts[0], **options)
    else:
        print(*_texts(model, tokenizer, args.prompts, **options), sep="\n")


def _print_stream(model, tokenizer, prompt: str, **options) -> None:
    import torch

    from mamba3.generate import stream

    ids = tokenizer.encode_prompt(prompt)
    input_ids = torch.tensor([ids], device=next(model.parameters()).device)
    steps = stream(model, input_ids, eos_token_id=tokenizer.eos_token_id, **options)
    print(tokenizer.decode(ids), end="", flush=True)
    for tokens in steps:
        print(tokenizer.decode(tokens), end="", flush=True)
    print()


def _texts(model, tokenizer, prompts: list[str], **options) -> list[str]:
    """Prompts with their continuations."""
    from mamba3.data.problems import prompt_batch
    from mamba3.generate import generate

    input_ids, mask = prompt_batch(prompts, tokenizer)
    device = next(model.parameters()).device
    output = generate(
        model,
        input_ids.to(device),
        attention_mask=mask.to(device),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    return [tokenizer.decode(row) for row in output]


# train, finetune, eval


def _add_train(commands) -> None:
    example = "mamba3 train configs/debug.yaml --out runs/debug --set optim.lr=2e-3 train.seed=1"
    add = _command(commands, _train, example).add_argument
    _add_recipe(add)
    add("--out", required=True, metavar="DIR", help="folder for the model and the run")
    add("--resume", action="store_true", help="continue the run in DIR from its last checkpoint")
    _add_json(add)


def _train(args) -> None:
    """Train a model by a recipe."""
    from mamba3.train import Stopped, load_recipe, train

    try:
        result = train(load_recipe(args.recipe, args.set), args.out, resume=args.resume)
    except Stopped as stopped:
        print(f"mamba3: {stopped}", file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from None
    if int(os.environ.get("RANK", 0)):  # which torchrun sets; all ranks have the same result
        return
    if args.json:
        print(json.dumps(result._asdict()))
        return
    print(f"{result.steps} steps, last loss {result.loss:.4g}, {result.seconds:.0f} s")
    _print_shares(result.per_task, result.exact_match, result.n)
    print(f"saved to {result.out}")


def _add_profile(commands) -> None:
    example = "mamba3 profile configs/debug.yaml --out profiles/debug"
    add = _command(commands, _profile, example).add_argument
    _add_recipe(add)
    add("--out", required=True, metavar="DIR", help="folder for the trace")
    add("--steps", type=int, default=10, metavar="N", help="steps to look at (%(default)s)")
    _add_json(add)


def _profile(args) -> None:
    """Show where the time of training steps goes, and write a trace of them."""
    from mamba3.train import load_recipe
    from mamba3.train.profile import profile

    found = profile(load_recipe(args.recipe, args.set), args.out, steps=args.steps)
    if args.json:
        print(
            json.dumps(
                {**found._asdict(), "parts": {n: s._asdict() for n, s in found.parts.items()}}
            )
        )
        return
    print(f"a step takes {found.step_ms:.2f} ms, one that is not recorded {found.eager_ms:.2f} ms")
    if found.busy is not None:
        print(
            f"the GPU is busy {found.busy:.0%} of these; cudaMalloc is called {found.mallocs} times"
        )
    print(f"\n{'part':12}  {'host ms':>9}  {'GPU ms':>9}")
    for name, spent in found.parts.items():
        device = "-" if spent.device_ms is None else f"{spent.device_ms:.3f}"
        print(f"{name:12}  {spent.host_ms:9.3f}  {device:>9}")
    print(f"\n{'ms':>9}  {'calls':>6}  name")
    for name, milliseconds, calls in found.kernels:
        print(f"{milliseconds:9.3f}  {calls:6.0f}  {name[:90]}")
    print(f"\nthe trace is in {found.trace}: open it at ui.perfetto.dev")


def _add_finetune(commands) -> None:
    example = f"mamba3 finetune --model {QUICKSTART_MODEL} --data rows.jsonl --out my-model"
    add = _command(commands, _finetune, example).add_argument
    _add_model(add)
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
    add("--overwrite", action="store_true", help="replace a model that is in DIR")
    _add_json(add)


def _finetune(args) -> None:
    """Teach a model a skill from prompt/completion rows, and measure it before and after."""
    from mamba3.eval.exact_match import percent
    from mamba3.train import finetune

    names = ["epochs", "steps", "lr", "batch_size", "seed", "valid_fraction", "device"]
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


def _add_tokenize(commands) -> None:
    example = f"mamba3 tokenize corpus.jsonl --out data/corpus --tokenizer {QUICKSTART_MODEL}"
    add = _command(commands, _tokenize, example).add_argument
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
    _add_json(add)


def _tokenize(args) -> None:
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


def _add_eval(commands) -> None:
    example = f"mamba3 eval --model {QUICKSTART_MODEL} --n 400"
    add = _command(commands, _eval, example).add_argument
    _add_model(add)
    add("--data", metavar="FILE.jsonl", help="rows to measure on (the arithmetic curriculum)")
    add("--n", type=int, help="rows of the file (all), or problems of each stage (2000)")
    add(
        "--stages",
        type=int,
        nargs="+",
        metavar="STAGE",
        help="stages of the curriculum (those of the model's recipe, or all)",
    )
    _add_json(add)


def _eval(args) -> None:
    """Measure exact match of greedy answers."""
    from mamba3 import zoo
    from mamba3.data import arithmetic
    from mamba3.data.jsonl import read_rows
    from mamba3.data.tokenizer import load_tokenizer
    from mamba3.eval.exact_match import exact_match

    if args.n is not None and args.n < 1:
        raise ValueError(f"--n must be at least 1, got {args.n}")
    folder = zoo.resolve(args.model)
    tokenizer = load_tokenizer(folder)
    if args.data:
        problems = read_rows(args.data, tokenizer)[: args.n]
    else:
        problems = [
            problem
            for stage in args.stages or _trained_stages(folder)
            for problem in arithmetic.eval_problems(stage, args.n or 2000)
        ]
    result = exact_match(_load(folder, _device(args)), tokenizer, problems)
    if args.json:
        values = result._asdict()
        misses = [miss._asdict() for miss in values.pop("misses")]
        print(json.dumps({"exact_match": values.pop("overall"), **values, "misses": misses}))
        return
    _print_shares(result.per_task, result.overall, result.n)
    for miss in result.misses:
        print(f"wrong: {miss.prompt!r} gave {miss.got!r}, expected {miss.answer!r}")
    if result.truncated:
        print(f"{result.truncated} answers had not ended when they were as long as the longest")


def _trained_stages(folder: Path) -> list[int]:
    """Stages that a model was trained on, as its recipe says; without one, all."""
    from mamba3.data import arithmetic
    from mamba3.train import load_recipe
    from mamba3.train.run import RECIPE_FILE

    recipe = folder / RECIPE_FILE
    return load_recipe(recipe).data.stages if recipe.is_file() else list(arithmetic.STAGES)


# info, list


def _add_info(commands) -> None:
    add = _command(commands, _info, f"mamba3 info {QUICKSTART_MODEL} --optimizer").add_argument
    add("model", metavar="NAME_OR_PATH", help="a name of `mamba3 list`, or a folder")
    add(
        "--optimizer",
        action="store_true",
        help="show which rule of the hybrid optimizer trains which parameter",
    )


def _info(args) -> None:
    """Show a model's architecture, its size in memory, and what it would run on."""
    from mamba3 import ops, zoo

    folder = zoo.resolve(args.model)
    model = zoo.load_model(folder)
    if args.optimizer:
        from mamba3.optim import ParamGroupEngine

        print(ParamGroupEngine(model).plan())
        return
    config = model.config
    weights = list(model.parameters())
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    state = sum(tensor.nbytes for tensor in _tensors(model.new_state(1)))
    form = f"MIMO, rank {config.mimo_rank}" if config.is_mimo else "SISO"
    facts = {
        "folder": folder,
        "form": f"{form}, {config.n_layer} layers of {config.n_heads} heads",
        "parameters": f"{sum(weight.numel() for weight in weights):,}",
        "weights": f"{_bytes(sum(weight.nbytes for weight in weights))} ({', '.join(dtypes)})",
        "state": f"{_bytes(state)} per sequence, whatever its length",
        "backend": ops.explain(),
    }
    for name, value in {**facts, **config.to_dict()}.items():
        print(f"{name:24} {value}")


def _tensors(state) -> list:
    """All tensors of a state, which is made of nested tuples."""
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in _tensors(part)]
    return [state]


def _add_list(commands) -> None:
    _command(commands, _list, "mamba3 list")


def _list(args) -> None:
    """List the models that ship with the package."""
    from mamba3 import zoo

    for name in zoo.list_models():
        model = zoo.MODELS[name]
        print(
            f"{name}  {model.parameters():,} parameters, {model.licence}\n    {model.description}"
        )


# doctor


def _add_doctor(commands) -> None:
    parser = _command(commands, _doctor, "mamba3 doctor --device cuda")
    parser.add_argument("--device", help="cpu, cuda, ... (a GPU if there is one)")


def _doctor(args) -> None:
    """Check that this machine computes Mamba-3 right, on every path that runs here."""
    import torch

    from mamba3 import doctor, ops

    device = _device(args)
    print(f"torch {torch.__version__} on {device}; by itself: {ops.explain(device)}")
    print("\n".join([*doctor.configurations(device), "", doctor.HEADER]))
    findings = []
    for found in doctor.check(device):
        findings.append(found)
        print(found, flush=True)
    wrong = [found for found in findings if not found.ok]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} of {len(findings)} comparisons are off on {device}: "
            + doctor.remedy(wrong)
        )
    print(f"\nall {len(findings)} comparisons are within rounding")


# printing


def _device(args) -> str:
    from mamba3.ops.dispatch import default_device

    return args.device or default_device()


def _print_shares(per_task: dict[str, float], overall: float, n: int) -> None:
    from mamba3.eval.exact_match import percent

    print(f"exact match on {n} problems: {percent(overall)}")
    for task, share in per_task.items():
        print(f"    {task:12} {percent(share):>8}")


def _bytes(n: int) -> str:
    for unit in ("bytes", "KB", "MB"):
        if n < 1000:
            return f"{n:.4g} {unit}"
        n /= 1000
    return f"{n:.4g} GB"


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"mamba3: warning: {message}", file=sys.stderr)
