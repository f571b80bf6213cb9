"""finetune: a run that teaches a model a skill from a file of prompt/completion rows."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mamba3 import hub, zoo
from mamba3.data.jsonl import read_rows, split_rows
from mamba3.data.tokenizer import load_tokenizer
from mamba3.train.config import DataRecipe, OptimRecipe, Recipe, TrainRecipe
from mamba3.train.run import train


class FinetuneResult(NamedTuple):
    """What a fine-tune came to.

    exact_match_before, exact_match_after: shares of the validation rows answered exactly.
    out: folder of the new model.
    steps, loss: optimizer steps made, loss of the last.
    n_train, n_valid: rows on each side of the split.
    seconds: wall time.
    """

    exact_match_before: float
    exact_match_after: float
    out: str
    steps: int
    loss: float
    n_train: int
    n_valid: int
    seconds: float


def finetune(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    epochs: float = 20,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int = 32,
    seed: int = 0,
    valid_fraction: float = 0.2,
    lora_rank: int = 0,
    overwrite: bool = False,
    device: str | None = None,
    progress: bool = True,
) -> FinetuneResult:
    """Fine-tune a model on prompt/completion rows, and measure it before and after.

    The loss is on the completion and the end token. Rows are split by a hash of the prompt; exact
    match is measured on the validation rows, which are never trained on.

    Args:
        model: name or folder of the model; its tokenizer is in the same folder.
        data: a .jsonl file of {"prompt": ..., "completion": ...}. The tokenizer adds what ends a
            prompt ("=" in the arithmetic models) where a row lacks it.
        out: folder for the new model, ready for the Hub, and metrics.jsonl.
        epochs: passes over the training rows; not used when `steps` is given.
        steps: optimizer steps; None takes `epochs`.
        lr: the highest learning rate; None takes 0.2 / d_model, at most 3e-3.
        batch_size: rows in a step.
        seed: of the order of the rows.
        valid_fraction: share of the rows kept for validation.
        lora_rank: rank of low-rank adapters, which alone are trained; 0 trains all weights.
        overwrite: replace the model in `out`, if there is one.
        device: such as "cpu" or "cuda"; None takes a GPU if there is one.
        progress: show a bar on standard error.

    Raises:
        FileExistsError: `out` holds a model already.
        FileNotFoundError: no such model or file.
        ValueError: a row that cannot be used, with its line; a value out of range.
        RuntimeError: loss or gradient became NaN or infinite; nothing is saved.
    """
    folder = zoo.resolve(model)
    config = hub.read_config(folder)
    data_recipe = DataRecipe(
        kind="rows", path=str(data), batch_size=batch_size, valid_fraction=valid_fraction
    )
    tokenizer = load_tokenizer(folder)
    train_rows, valid_rows = split_rows(read_rows(data, tokenizer), valid_fraction)
    if steps is None:
        steps = round(epochs * len(train_rows) / batch_size)
    if steps < 1:
        raise ValueError(f"there must be at least 1 step, got {steps}; raise epochs or steps")
    recipe = Recipe(
        data=data_recipe,
        optim=OptimRecipe(
            lr=min(3e-3, 0.2 / config.d_model) if lr is None else lr,
            warmup_steps=steps // 10,
            decay_steps=steps,
            weight_decay=0.01,
        ),
        train=TrainRecipe(
            steps=steps,
            seed=seed,
            init_from=_name_of(model, folder),
            lora_rank=lora_rank,
            device=device,
        ),
    )
    result = train(recipe, out, overwrite=overwrite, progress=progress)
    return FinetuneResult(
        exact_match_before=result.before.exact_match.overall,
        exact_match_after=result.after.exact_match.overall,
        out=result.out,
        steps=result.steps,
        loss=result.loss,
        n_train=len(train_rows),
        n_valid=len(valid_rows),
        seconds=result.seconds,
    )


def _name_of(model: str | Path, folder: Path) -> str:
    """What a recipe calls a model by: a name that holds anywhere, or else its whole path."""
    return str(model) if str(model) in zoo.MODELS else str(folder.absolute())
