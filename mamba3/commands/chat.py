"""chat: a conversation with a model."""

from __future__ import annotations

import contextlib
import sys

from mamba3.commands.arguments import command
from mamba3.commands.generate import OPTIONS, add_sampling, add_tokenizer, say_if_plain
from mamba3.commands.loading import device_of, load

HELP = "/reset begins anew, /exit or the end of the input ends"


def add(commands) -> None:
    example = 'mamba3 chat ./runs/assistant --system "Be brief." --temperature 0.7'
    add = command(commands, run, example).add_argument
    add("model", metavar="NAME_OR_PATH", help="a name of `mamba3 list`, a folder or a Hub id")
    add("--device", help="cpu, cuda, ... (a GPU if there is one)")
    add_tokenizer(add)
    add("--system", metavar="TEXT", help="what the system message says")
    add_sampling(add, max_new_tokens=512)


def run(args) -> None:
    """Talk with a model; /reset begins anew, /exit ends."""
    from mamba3 import zoo
    from mamba3.conversation import Conversation
    from mamba3.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer or args.model)
    say_if_plain(tokenizer)
    model = load(zoo.resolve(args.model), device_of(args))
    options = {name: getattr(args, name) for name in OPTIONS}
    talk(Conversation(model, tokenizer, system=args.system, **options))


def talk(conversation) -> None:
    """Read lines and print answers until /exit or the end of the input."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  lets input() edit lines and recall them
        print(HELP)
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
        except EOFError:
            break
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print(f"no command {line.split()[0]}; {HELP}", file=sys.stderr)
        elif line:
            _answer(conversation, line)


def _answer(conversation, line: str) -> None:
    """Print the answer as it comes; one that fails or is broken off leaves no trace."""
    try:
        conversation.say(line, stream=lambda piece: print(piece, end="", flush=True))
    except ValueError as error:
        print(f"mamba3: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nmamba3: broken off; the question is forgotten", file=sys.stderr)
    else:
        print()
