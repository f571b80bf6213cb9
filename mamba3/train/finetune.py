"""finetune: teach a model a skill from a file of prompt/completion rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch

from mamba3 import hub, zoo
from mamba3.data.jsonl import read_rows, split_rows
from mamba3.data.problems import EpochStream
from mamba3.data.tokenizer import load_tokenizer
from mamba3.eval.exact_match import exact_match
from mamba3.ops.dispatch import default_device
from mamba3.threads import limited_threads, worthwhile_threads
from mamba3.train.card import write_card
from mamba3.train.checkpoint import refuse_to_overwrite
from mamba3.train.config import OptimRecipe, StepRecipe
from mamba3.train.log import METRICS_FILE, MetricsLog
from mamba3.train.loop import fit, make_step
from mamba3.train.run import own_rng


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
        overwrite: replace the model in `out`, if there is one.
        device: such as "cpu" or "cuda"; None takes a GPU if there is one.
        progress: show a bar on standard error.

    Raises:
        FileExistsError: `out` holds a model already.
        FileNotFoundError: no such model or file.
        ValueError: a row that cannot be used, with its line; a value out of range.
        RuntimeError: loss or gradient became NaN or infinite; nothing is saved.
    """
    began = time.perf_counter()
    out = Path(out)
    if not overwrite:
        refuse_to_overwrite(out, "choose another folder, or overwrite it")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    folder = zoo.resolve(model)
    tokenizer = load_tokenizer(folder)
    rows = read_rows(data, tokenizer)
    train_rows, valid_rows = split_rows(rows, valid_fraction)
    if steps is None:
        steps = round(epochs * len(train_rows) / batch_size)
    if steps < 1:
        raise ValueError(f"there must be at least 1 step, got {steps}; raise epochs or steps")
    lm = zoo.load_model(folder, dtype=torch.float32, device=device or default_device())
    optim = OptimRecipe(
        lr=min(3e-3, 0.2 / lm.config.d_model) if lr is None else lr,
        warmup_steps=steps // 10,
        decay_steps=steps,
        weight_decay=0.01,
    )
    out.mkdir(parents=True, exist_ok=True)
    with own_rng(seed), limited_threads(worthwhile_threads(lm)):
        results = {"before": exact_match(lm, tokenizer, valid_rows)}
        log = MetricsLog(out / METRICS_FILE, last_step=-1)
        log.write(0, exact_match=results["before"].overall, n=len(valid_rows))
        loss = fit(
            make_step(lm, optim, StepRecipe()),
            EpochStream(train_rows, tokenizer, batch_size=batch_size, seed=seed),
            optim,
            StepRecipe(),
            steps=steps,
            log=log,
            progress=progress,
        )
        results["after"] = exact_match(lm, tokenizer, valid_rows)
        log.write(steps, exact_match=results["after"].overall, n=len(valid_rows))
    hub.save_pretrained(lm, out, tokenizer=tokenizer)
    write_card(
        out,
        model=lm,
        summary=(
            f"Fine-tuned with mamba3 from {Path(model).name} on {len(train_rows)} rows of "
            f"{Path(data).name}: {steps} steps of {batch_size} rows, seed {seed}, AdamW with a "
            f"learning rate of {optim.lr:.2g}. What the model knew before may have been forgotten."
        ),
        measured_on=(
            f"Measured on {len(valid_rows)} other rows of the file, split off by a hash and never "
            "trained on, before and after."
        ),
        results=results,
        example=valid_rows[0].prompt,
    )
    return FinetuneResult(
        exact_match_before=results["before"].overall,
        exact_match_after=results["after"].overall,
        out=str(out),
        steps=steps,
        loss=loss,
        n_train=len(train_rows),
        n_valid=len(valid_rows),
        seconds=time.perf_counter() - began,
    )
