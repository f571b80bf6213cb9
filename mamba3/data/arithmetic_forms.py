"""What a user writes, and what a model reads and writes: problems of numbers in several forms.

    operands       978+145 reads   what it is
    plain          978+145         most significant digit first
    reversed       879+541         least significant digit first
    interleaved    +857491         the operators, then the digits of all numbers by column, ones
                                   first, with zeros up to the longest number
    columns        +85_74_91_      the same, and the model writes a digit of the answer into each
                                   blank as soon as it has read the column. Whether a difference
                                   is negative has to be known before that: 145-978 is
                                   -584719,58_47_19_, where all columns come twice

    answer_order   1123 is         -833 is
    msd_first      1123            -833
    lsd_first      3211            338-

With columns, an answer has zeros in front up to the number of columns (978-945 is 330), and what
does not go into blanks, a last carry or a sign, comes after the prompt. What a model has to keep in
mind is then the same at every length: the carry, and which number is the larger one so far.

    brackets       %((3+4)*2) reads
    plain          %((3+4)*2)
    working        %((3+4)___*2)___    after each pair of brackets the model writes its left
                                       operand, its operator and its value, 3+2 and 2*4 (,,3 after
                                       (3)), and the whole value once more after the prompt

Products are not interleaved but reversed; with columns, 978*5 is *85_75_95_, the single digit in
every column, and longer ones are reversed. Working that is written out (282+1410=1692) has each of
its numbers in that order. What is not made of numbers with + - * between them, as `c1203` or
`120?45`, is the same in all forms, but for brackets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mamba3.data.problems import BLANK

ANSWER_ORDERS = ("msd_first", "lsd_first")
OPERANDS = ("plain", "reversed", "interleaved", "columns")
BRACKETS = ("plain", "working")
WORKING = 3  # blanks after a pair of brackets

_NUMBERS = re.compile(r"\d+(?:[+\-*]\d+)+")
_COLUMNS = re.compile(rf"([+\-]+|\*)(?:\d+,)?([\d{BLANK}]+)")
_MODULO = re.compile(r"(.+)%5")


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a model reads and writes numbers.

    Args:
        answer_order: one of `ANSWER_ORDERS`.
        operands: one of `OPERANDS`; "columns" needs lsd_first.
        brackets: one of `BRACKETS`.
    """

    answer_order: str = "msd_first"
    operands: str = "plain"
    brackets: str = "plain"

    def __post_init__(self):
        known_values = {
            "answer_order": ANSWER_ORDERS,
            "operands": OPERANDS,
            "brackets": BRACKETS,
        }
        for name, known in known_values.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if self.operands == "columns" and self.answer_order != "lsd_first":
            raise ValueError(
                "operands columns are answered from the last digit on: they need answer_order "
                f"lsd_first, got {self.answer_order}"
            )

    def __str__(self) -> str:
        """As a model card tells it."""
        told = f"answers {self.answer_order}, operands {self.operands}"
        return told if self.brackets == "plain" else f"{told}, brackets with {self.brackets}"

    def layout_of(self, operators: str, last: int) -> str:
        """The layout of numbers with these operators between, the last of `last` digits."""
        if "*" not in operators or self.operands == "plain":
            return self.operands
        by_digit = operators == "*" and last == 1 and self.operands == "columns"
        return "columns" if by_digit else "reversed"

    def is_worked(self, prompt: str) -> bool:
        """Whether a problem in its natural form is one whose brackets have blanks."""
        return self.brackets == "working" and prompt.startswith("%")

    def compares(self, operators: str) -> bool:
        """Whether columns come twice, since the sign of the answer depends on all of them."""
        return self.operands == "columns" and operators == "-"


def natural(text: str) -> str:
    """A problem as it is known by, of what a user may write.

    Spaces, a last "=" and zeros in front of numbers go; the longer factor comes first; (3+4)%5 is
    %3+4, the way modular arithmetic is named.
    """
    text = "".join(text.split()).removesuffix("=")
    if modulo := _MODULO.fullmatch(text):
        inner = modulo[1]
        bare = inner[1:-1] if inner[0] == "(" and inner[-1] == ")" else inner
        return f"%{inner if re.search('[()]', bare) else bare}"
    if not _NUMBERS.fullmatch(text):
        return text
    text = re.sub(r"\b0+(?=\d)", "", text)
    factors = text.split("*")
    if len(factors) == 2 and all(map(str.isdigit, factors)):
        return "*".join(sorted(factors, key=len, reverse=True))
    return text


def prompt_to_model(prompt: str, form: Form) -> str:
    """A problem in its natural form as a model reads it."""
    if form.is_worked(prompt):
        return prompt.replace(")", ")" + WORKING * BLANK)
    if not _NUMBERS.fullmatch(prompt):
        return prompt
    operators, operands = "".join(re.findall(r"[+\-*]", prompt)), re.findall(r"\d+", prompt)
    layout = form.layout_of(operators, len(operands[-1]))
    if layout == "plain":
        return prompt
    if layout == "reversed":
        return _reversed_numbers(prompt)
    most = max(map(len, operands))
    if operators == "*":
        operands[1] *= most
    digits = zip(*(number[::-1].ljust(most, "0") for number in operands), strict=True)
    columns = ["".join(column) for column in digits]
    compared = f"{''.join(columns)}," if form.compares(operators) else ""
    blank = BLANK if layout == "columns" else ""
    return operators + compared + "".join(column + blank for column in columns)


def prompt_from_model(prompt: str, form: Form) -> str:
    """The natural form of what a model reads."""
    if form.is_worked(prompt):
        return prompt.replace(BLANK, "")
    by_column = form.operands in ("interleaved", "columns")
    if columns := by_column and _COLUMNS.fullmatch(prompt):
        operators, digits = columns[1], columns[2].replace(BLANK, "")
        count = len(operators) + 1
        operands = [str(int(digits[i::count][::-1])) for i in range(count)]
        if operators == "*":
            operands[1] = operands[1][0]
        return operands[0] + "".join(map("".join, zip(operators, operands[1:], strict=True)))
    if form.operands == "plain" or not _NUMBERS.fullmatch(prompt):
        return prompt
    return _reversed_numbers(prompt)


def answer_from_model(prompt: str, answer: str, form: Form) -> str:
    """The natural form of what a model wrote about a problem, which is in its natural form."""
    if form.is_worked(prompt):
        return answer[WORKING * prompt.count(")") :]
    if form.answer_order == "msd_first" or not _NUMBERS.fullmatch(prompt):
        return answer
    answer = re.sub(r"-?\d+-?", lambda number: number[0][::-1], answer)
    return re.sub(r"\b0+(?=\d)", "", answer) if form.operands == "columns" else answer


def result_of(answer: str) -> str:
    """The last number of an answer in its natural form: what comes after its working."""
    return answer.rpartition("=")[2] or answer


def _reversed_numbers(text: str) -> str:
    return re.sub(r"\d+", lambda number: number[0][::-1], text)
