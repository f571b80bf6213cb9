"""finetune: a run that teaches a model what rows of a user's own say, without a recipe file.

from mamba3.train import finetune

result = finetune("arithmetic-tiny", "rows.jsonl", "my-model", epochs=20)
print(result.exact_match_before, result.exact_match_after)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mamba3 import hub, zoo
from mamba3.train.config import Recipe
from mamba3.train.data_recipe import FORM_KEYS
from mamba3.train.run import train, trained_on
from mamba3.train.tasks import Measured
from mamba3.train.tasks.rows import ARITHMETIC, PromptRows, share_of

# Rows to see, in as many passes as that takes, where nobody says how long.
ROWS_SEEN, MOST_EPOCHS = 10_000, 20
# Of a recipe's data: which problems of the curriculum, and how they are written.
PROBLEM_KEYS = ("stages", "tasks", "shares", *FORM_KEYS, "digits", "symbols")


class FinetuneResult(NamedTuple):
    """What a fine-tune came to.

    exact_match_before, exact_match_after: shares of the validation rows answered exactly; None
        where answers are long, or rows have none.
    out: folder of the new model.
    steps, loss: optimizer steps made, loss of the last.
    n_train, n_valid: rows on each side of the split.
    seconds: wall time.
    eval_loss_before, eval_loss_after: mean loss of the validation rows, nats a token.
    old_before, old_after: exact match on `mix_data`; None without it.
    """

    exact_match_before: float | None
    exact_match_after: float | None
    out: str
    steps: int
    loss: float
    n_train: int
    n_valid: int
    seconds: float
    eval_loss_before: float
    eval_loss_after: float
    old_before: float | None
    old_after: float | None


def finetune(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    **options: Any,
) -> FinetuneResult:
    """Fine-tune a model on rows of texts, prompts or messages, and measure it before and after.

    Args:
        model, data, options: as of `finetune_recipe`.
        out: folder for the new model, ready for the Hub, recipe.yaml and metrics.jsonl.
        resume: continue the run in `out`, from its last checkpoint.
        overwrite: replace the model in `out`, if there is one.
        progress: show a bar on standard error.

    Raises:
        FileExistsError: `out` holds a model already.
        FileNotFoundError: no such model or file, or no run to resume.
        ValueError: a row that cannot be used, with its line; a value out of range.
        RuntimeError: loss or gradient became NaN or infinite; nothing is saved.
    """
    recipe = finetune_recipe(model, data, **options)
    result = train(recipe, out, resume=resume, overwrite=overwrite, progress=progress)
    before, after, rows = result.before, result.after, recipe.data.rows
    return FinetuneResult(
        exact_match_before=share_of(before.exact_match, old=False),
        exact_match_after=share_of(after.exact_match, old=False),
        out=result.out,
        steps=result.steps,
        loss=result.loss,
        n_train=len(rows.train),
        n_valid=len(rows.valid),
        seconds=result.seconds,
        eval_loss_before=_loss(before),
        eval_loss_after=_loss(after),
        old_before=share_of(before.exact_match, old=True),
        old_after=share_of(after.exact_match, old=True),
    )


def finetune_recipe(
    model: str | Path,
    data: str | Path,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int = 32,
    seed: int = 0,
    valid_fraction: float = 0.2,
    columns: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    loss_on: str = "answers",
    pack: int | None = None,
    too_long: str = "cut",
    mix: float = 0.0,
    mix_data: str | Path | None = None,
    lora_rank: int = 0,
    precision: str = "float32",
    eval_every: int = 0,
    device: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe of a fine-tune, for `mamba3.train.train`; it has read the rows.

    The loss is on completions with their end, on what an assistant says, or on whole texts.

    Args:
        model: name or folder of the model.
        data: rows, as of `mamba3.data.rows.load_rows`: a file, a folder with train.* and valid.*,
            or a data set of the Hub. The tokenizer adds what ends a prompt ("=" in the arithmetic
            models) where a row lacks it.
        epochs: passes over the training rows; None takes as many as see 10,000 rows, 1 to 20.
        steps: optimizer steps, instead of epochs.
        lr: the highest learning rate; None takes 0.2 / d_model, at most 3e-3.
        batch_size: rows in a step.
        seed: of the order of the rows.
        valid_fraction: share of the rows kept for validation, where no file is for that.
        columns: keys of the rows that have other names, as in {"prompt": "question"}.
        tokenizer: name or folder of one; None takes that in the model's folder.
        loss_on: "answers", or "all" tokens.
        pack: rows are packed into rows of so many tokens; None pads them.
        too_long: what of rows that are longer: "cut" or "drop".
        mix: share of a step's rows that are taken of `mix_data`, to keep what the model knew.
        mix_data: other rows, or "arithmetic", the problems of the curriculum that the model was
            trained on; with mix=0 they are measured alone.
        lora_rank: rank of low-rank adapters, which alone are trained; 0 trains all weights.
        precision: "float32", "bf16", "fp16" or "bf16-weights".
        eval_every: steps between evaluations; 0 makes them at the start and at the end alone.
        device: such as "cpu" or "cuda"; None takes a GPU if there is one.
        changes: any other keys of a recipe, as in {"optim.weight_decay": 0.1}.

    Raises:
        as `finetune`.
    """
    folder = zoo.resolve(model)
    width = hub.read_config(folder).d_model
    mix_path = None if mix_data is None else str(mix_data)
    values: dict[str, dict[str, Any]] = {
        "data": {
            "kind": "rows",
            "path": str(data),
            "batch_size": batch_size,
            "valid_fraction": valid_fraction,
            "columns": dict(columns or {}),
            "tokenizer": tokenizer,
            "loss_on": loss_on,
            "length": pack,
            "too_long": too_long,
            "mix": mix,
            "mix_path": mix_path,
        },
        "optim": {"lr": min(3e-3, 0.2 / width) if lr is None else lr, "weight_decay": 0.01},
        "step": {"precision": precision},
        "train": {
            "steps": 1 if steps is None else steps,
            "seed": seed,
            "init_from": _name_of(model, folder),
            "lora_rank": lora_rank,
            "eval_every": eval_every,
            "device": device,
        },
    }
    if mix_path == ARITHMETIC:
        values["data"] |= _problems_of(folder)
    for key, value in (changes or {}).items():
        group, _, name = key.partition(".")
        values.setdefault(group, {})[name] = value
    recipe = Recipe.from_dict(values)
    if steps is None and "train.steps" not in (changes or {}):
        recipe = _with_steps(recipe, epochs)
    last = recipe.train.steps
    schedule = {"warmup_steps": last // 10, "decay_steps": last}
    given = {name: values["optim"][name] for name in schedule if name in values["optim"]}
    return dataclasses.replace(
        recipe, optim=dataclasses.replace(recipe.optim, **(schedule | given))
    )


def _problems_of(folder: Path) -> dict[str, Any]:
    """Which problems of the curriculum a model knows, and in which form."""
    data = trained_on(folder)
    if data is None or data.kind != "arithmetic":
        return {}
    return {name: getattr(data, name) for name in PROBLEM_KEYS}


def _with_steps(recipe: Recipe, epochs: float | None) -> Recipe:
    """A recipe with the steps of so many passes over its rows."""
    n_rows = len(recipe.data.rows.train)
    chosen = min(MOST_EPOCHS, max(1, ROWS_SEEN / n_rows)) if epochs is None else epochs
    if recipe.data.length is not None:
        n_rows = PromptRows(recipe).rows_an_epoch
    steps = round(chosen * n_rows / (recipe.data.batch_size - recipe.data.mixed_rows))
    if epochs is None:
        steps = max(1, steps)
    if steps < 1:
        raise ValueError(f"there must be at least 1 step, got {steps}; raise epochs or steps")
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=steps))


def _loss(measured: Measured) -> float:
    return measured.perplexity.loss


def _name_of(model: str | Path, folder: Path) -> str:
    """What a recipe calls a model by: a name that holds anywhere, or else its whole path."""
    is_name = isinstance(model, str) and not Path(model).is_dir()
    return model if is_name and not model.startswith("local-dir:") else str(folder.absolute())
