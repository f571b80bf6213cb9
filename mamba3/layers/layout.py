"""What a module says of its parameters, for optimizers: which rows are matrices of their own.

A module's method `parameter_layout()` returns, for the paths of its parameters ("in_proj.weight"),
the `Rows` they consist of, from the first row on. `mamba3.optim.ParamGroupEngine` reads it.
"""

from __future__ import annotations

from typing import NamedTuple


class Rows(NamedTuple):
    """A block of consecutive rows of a parameter, or all of it.

    Fields:
        label: name of the block; "" is the whole parameter.
        count: number of rows; None is all of them.
        rule: "muon" for a matrix that maps features to features, "adamw" for everything else.
        decay: whether weight decay applies.
    """

    label: str = ""
    count: int | None = None
    rule: str = "adamw"
    decay: bool = False


MATRIX = (Rows(rule="muon", decay=True),)
# Biases, norms, scalars a head; a table of embeddings, of which a step touches single rows.
VECTOR = EMBEDDING = (Rows(),)

Layout = dict[str, tuple[Rows, ...]]


def blocks(**counts: int) -> tuple[Rows, ...]:
    """Matrices that one projection holds one below the other, by label and number of rows."""
    return tuple(Rows(label, count, "muon", True) for label, count in counts.items())
