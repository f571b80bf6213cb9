"""Every form that problems of the curriculum can have, and answers in them."""

import re

from mamba3.data.arithmetic_forms import ANSWER_ORDERS, OPERANDS, Form, prompt_to_model
from mamba3.data.problems import BLANK

# Columns are answered from the last digit on.
FORMS = [
    Form(answer_order=order, operands=layout)
    for order in ANSWER_ORDERS
    for layout in OPERANDS
    if (order, layout) != ("msd_first", "columns")
] + [Form(brackets="working")]


def named(form):
    """A form as the name of a test."""
    brackets = "" if form.brackets == "plain" else f"-{form.brackets}"
    return f"{form.answer_order}-{form.operands}{brackets}"


def answer_to_model(prompt, answer, form):
    """The answer to a problem, both in their natural forms, as a model writes it."""
    if form.brackets == "working" and prompt[0] == "%":
        return "".join(worked(prompt[1:])) + answer
    if form.answer_order == "msd_first" or not re.fullmatch(r"\d+([+\-*]\d+)+", prompt):
        return answer
    if columns := prompt_to_model(prompt, form).count(BLANK):
        digits, sign = answer.lstrip("-"), "-" * answer.startswith("-")
        return digits[::-1].ljust(columns, "0") + sign
    return re.sub(r"-?\d+", lambda number: number[0][::-1], answer)


def worked(expression):
    """What is written after each pair of brackets, in the order in which they are closed."""
    opened, written = [], []
    for place, character in enumerate(expression):
        if character == "(":
            opened.append(place)
        elif character == ")":
            inside = expression[opened.pop() + 1 : place]
            left, sign = left_and_sign(inside)
            written.append(f"{left}{sign}{eval(inside) % 5}")
    return written


def left_and_sign(inside):
    """The left operand's value and the operator of what one pair of brackets holds, or commas."""
    depth = 0
    for place, character in enumerate(inside):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character in "+-*" and place > 0:
            return eval(inside[:place]) % 5, character
    return ",", ","
