"""Prompts with blanks: a model reads up to a blank, writes the likeliest token there, and reads on.

`generate` continues what comes of it. What a model has to keep in mind between reading and writing
can then be small, however long a prompt is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mamba3.models.lm import Mamba3LM


@torch.inference_mode()
def fill(model: Mamba3LM, input_ids: Tensor, blanks: Sequence[int]) -> Tensor:
    """Fill the blanks of a batch of prompts, in order, each after what stands before it.

    Args:
        model: the language model.
        input_ids: (B, L) integers, of which those at blanks do not count.
        blanks: places in the prompts, the same in all, rising; none is the first.

    Returns:
        (B, L) int64.

    Raises:
        ValueError: places out of range or order.

    Example:
        >>> ids = fill(model, torch.tensor([[1, 14, 8, 11, 0]]), [4])
    """
    length, known = input_ids.shape[1], model.config.vocab_size
    if sorted(set(blanks)) != list(blanks) or not all(0 < place < length for place in blanks):
        raise ValueError(
            f"blanks must rise, and lie between 1 and {length - 1} in prompts of {length} tokens, "
            f"got {list(blanks)}"
        )
    ids, state, read = input_ids.long().clone(), None, 0
    for place in blanks:
        piece = ids[:, read:place]
        out = model(piece, state=state, return_state=True, logits_to_keep=1)
        ids[:, place] = out.logits[:, -1, :known].argmax(-1)
        state, read = out.state, place
    return ids


def filled_rows(
    model: Mamba3LM,
    rows: Sequence[Sequence[int]],
    blanks: Sequence[Sequence[int]],
    *,
    batch_size: int,
) -> list[list[int]]:
    """Prompts of any lengths with their blanks filled; those with the same ones go together.

    Args:
        model: the language model.
        rows: ids of each prompt.
        blanks: places of each prompt's blanks; a prompt without any stays as it is.
        batch_size: the most prompts at once.
    """
    found, alike = [list(row) for row in rows], defaultdict(list)
    for i, places in enumerate(blanks):
        if places:
            alike[tuple(places)].append(i)
    device = next(model.parameters()).device
    for places, group in alike.items():
        end = places[-1] + 1
        for first in range(0, len(group), batch_size):
            some = group[first : first + batch_size]
            ids = torch.tensor([found[i][:end] for i in some], device=device)
            for i, row in zip(some, fill(model, ids, places).tolist(), strict=True):
                found[i][:end] = row
    return found
