"""generate: text from a model."""

from __future__ import annotations

from mamba3.commands.arguments import QUICKSTART_MODEL, add_model, command
from mamba3.commands.loading import device_of, load

OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def add(commands) -> None:
    example = f'mamba3 generate --model {QUICKSTART_MODEL} "8+7=" "3-9="'
    add = command(commands, run, example).add_argument
    add_model(add)
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


def run(args) -> None:
    """Continue one prompt, shown as it comes, or several as a batch."""
    from mamba3 import zoo
    from mamba3.data.tokenizer import load_tokenizer

    folder = zoo.resolve(args.model)
    tokenizer = load_tokenizer(folder)
    model = load(folder, device_of(args))
    options = {name: getattr(args, name) for name in OPTIONS}
    if len(args.prompts) == 1:
        _print_stream(model, tokenizer, args.prompts[0], **options)
    else:
        print(*texts(model, tokenizer, args.prompts, **options), sep="\n")


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


def texts(model, tokenizer, prompts: list[str], **options) -> list[str]:
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
