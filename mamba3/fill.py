"""Prompts with blanks: a model reads up to a blank, writes the likeliest token there, and reads on.

`generate` continues what comes of it. What a model has to keep in mind between reading and writing
can then be small, however long a prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mamba3.generate_text import left_padded

if TYPE_CHECKING:
    from mamba3.models.lm import Mamba3LM


def fill(
    model: Mamba3LM,
    rows: Sequence[Sequence[int]],
    blanks: Sequence[Sequence[int]],
    *,
    batch_size: int = 256,
) -> list[list[int]]:
    """Fill the blanks of prompts, those of each in order, each after what stands before it.

    Args:
        model: the language model.
        rows: ids of each prompt, of which those at blanks do not count.
        blanks: places of each prompt's blanks, rising, none of them the first; a prompt without any
            stays as it is.
        batch_size: the most prompts at once.

    Raises:
        ValueError: places out of range or order.

    Example:
        >>> fill(model, [[1, 14, 8, 11, 0, 9, 4, 0]], [[4, 7]])
    """
    for row, places in zip(rows, blanks, strict=True):
        if sorted(set(places)) != list(places) or not all(0 < at < len(row) for at in places):
            raise ValueError(
                f"blanks must rise, and lie between 1 and {len(row) - 1} in a prompt of "
                f"{len(row)} tokens, got {list(places)}"
            )
    found = [list(row) for row in rows]
    having = [i for i, places in enumerate(blanks) if places]
    for first in range(0, len(having), batch_size):
        some = having[first : first + batch_size]
        _fill([found[i] for i in some], [blanks[i] for i in some], model)
    return found


@torch.inference_mode()
def _fill(rows: list[list[int]], blanks: list[Sequence[int]], model: Mamba3LM) -> None:
    """Fill the blanks of a batch where they are: the first of all rows, the second, and so on."""
    device, known = next(model.parameters()).device, model.config.vocab_size
    read, state = [0] * len(rows), None
    for number in range(max(map(len, blanks))):
        # A row whose blanks are filled is fed anything: what it says is not asked for.
        pieces = [
            row[start : places[number]] if number < len(places) else [0]
            for row, start, places in zip(rows, read, blanks, strict=True)
        ]
        ids, mask = left_padded(pieces, device)
        mask = None if mask.all() else mask
        out = model(ids, attention_mask=mask, state=state, return_state=True, logits_to_keep=1)
        state = out.state
        for i, token in enumerate(out.logits[:, -1, :known].argmax(-1).tolist()):
            if number < len(blanks[i]):
                read[i] = blanks[i][number]
                rows[i][read[i]] = token
