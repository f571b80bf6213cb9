"""solve: answers to problems as people write them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mamba3.commands.arguments import command
from mamba3.commands.loading import device_of


def add(commands) -> None:
    add = command(commands, run, 'mamba3 solve "3-9" "8+7"').add_argument
    add("problems", nargs="*", metavar="PROBLEM", help="such as 978+145 (-- before a first minus)")
    add("--file", metavar="F", help="a problem a line")
    add("--model", metavar="NAME_OR_PATH", help="what answers (the shipped model that was taught)")
    add("--device", help="cpu, cuda, ... (cpu)")
    add("--json", action="store_true", help="print each answer as a line of JSON")


def run(args) -> None:
    """Answer arithmetic, as in 8+7: an answer a line."""
    from mamba3.solve import solve

    problems = _problems(args)
    answers = solve(problems, args.model, device=args.device and device_of(args))
    for answer in answers:
        print(json.dumps(answer._asdict()) if args.json else answer.answer)
    for line in _warnings(answers):
        print(f"mamba3: warning: {line}", file=sys.stderr)


def _problems(args) -> list[str]:
    if bool(args.problems) == (args.file is not None):
        raise ValueError("give problems or --file, one of them")
    if args.problems:
        return args.problems
    lines = Path(args.file).read_text(encoding="utf-8").splitlines()
    problems = [line for line in lines if line.strip()]
    if not problems:
        raise ValueError(f"{args.file} holds no problem")
    return problems


def _warnings(answers) -> list[str]:
    """What was not trained, and what did not end; the same reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for answer in answers:
        told = [answer.outside] if answer.outside else []
        told += [] if answer.ended else ["the answer does not end"]
        for reason in told:
            reasons.setdefault((answer.model, reason), []).append(answer.problem)
    lines = []
    for (model, reason), problems in reasons.items():
        first = problems[0] if len(problems[0]) <= 40 else f"{problems[0][:37]}..."
        others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        lines.append(f"{first}{others}: {reason}; {model} may be wrong")
    return lines
