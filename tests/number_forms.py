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
        return "".join(map(str, held(prompt[1:]))) + answer
    if form.answer_order == "msd_first" or not re.fullmatch(r"\d+([+\-*]\d+)+", prompt):
        return answer
    if columns := prompt_to_model(prompt, form).count(BLANK):
        digits, sign = answer.lstrip("-"), "-" * answer.startswith("-")
        return digits[::-1].ljust(columns, "0") + sign
    return re.sub(r"-?\d+", lambda number: number[0][::-1], answer)


def held(expression):
    """What each pair of brackets holds, modulo 5, in the order in which they are closed."""
    opened, values = [], []
    for place, character in enumerate(expression):
        if character == "(":
            opened.append(place)
        elif character == ")":
            values.append(eval(expression[opened.pop() : place + 1]) % 5)
    return values
