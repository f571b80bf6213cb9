"""The model card (README.md) of a trained folder: what it is, measured numbers, how to use it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from mamba3.atomic import replace_text
from mamba3.eval.exact_match import ExactMatch, percent
from mamba3.train.tasks import Measured, Told

CARD_FILE = "README.md"


def write_card(
    folder: str | Path,
    *,
    model,
    summary: str,
    told: Told,
    results: dict[str, Measured],
    base_model: str | None = None,
) -> None:
    """Write the README.md of a model folder.

    Args:
        folder: the model's folder.
        model: the `Mamba3LM` in it.
        summary: what was trained, on what, how long, with which seed.
        told: of its data.
        results: measurements, by column of the table.
        base_model: name of the model it was trained from.
    """
    folder = Path(folder)
    name = folder.resolve().name
    last = list(results.values())[-1]
    data = ModelCardData(
        library_name="mamba3",
        pipeline_tag="text-generation",
        tags=["mamba3", *told.tags],
        base_model=base_model,
        model_name=name,
        eval_results=_eval_results(last),
    )
    config = model.config
    form = f"MIMO of rank {config.mimo_rank}" if config.is_mimo else "SISO"
    n_parameters = sum(p.numel() for p in model.parameters())
    lines = [
        "---",
        data.to_yaml(),
        "---",
        "",
        f"# {name}",
        "",
        f"A Mamba-3 language model ({form}, {config.n_layer} layers, d_model {config.d_model}, "
        f"d_state {config.d_state}, {n_parameters:,} parameters). {summary}",
        "",
        *_measured(told, results),
        "",
        "## Use",
        "",
        "```python",
        *_usage(name, told.example),
        "```",
        "",
    ]
    replace_text(folder / CARD_FILE, "\n".join(lines))


def _eval_results(measured: Measured) -> list[EvalResult]:
    """In the Hub's form."""
    if measured.exact_match is None:
        return [
            EvalResult(
                task_type="text-generation",
                dataset_type="text",
                dataset_name="held-out text",
                metric_type="perplexity",
                metric_value=measured.perplexity.perplexity,
            )
        ]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="problems",
            dataset_name=f"problems of the task {task}",
            dataset_config=task,  # what keeps the results of tasks apart
            metric_type="exact_match",
            metric_value=share,
        )
        for task, share in measured.exact_match.per_task.items()
    ]


def _usage(name: str, example: str | None) -> list[str]:
    if example is None:
        return ["from mamba3 import load_model", "", f'model = load_model("{name}")']
    return [
        "import torch",
        "from mamba3 import load_model, load_tokenizer",
        "",
        f'model = load_model("{name}")',
        f'tokenizer = load_tokenizer("{name}")',
        f'prompt = torch.tensor([tokenizer.encode_prompt("{example}")])',
        "output = model.generate(prompt, 16, eos_token_id=tokenizer.eos_token_id)",
        "print(tokenizer.decode(output[0]))",
    ]


def _measured(told: Told, results: dict[str, Measured]) -> list[str]:
    exact = {name: measured.exact_match for name, measured in results.items()}
    if None not in exact.values():
        how = "Greedy generation, whole answer and end token."
        return ["## Exact match", "", f"{how} {told.measured_on}", "", *_table(exact)]
    rows = [
        f"| {name} | {m.perplexity.loss:.4f} | {m.perplexity.perplexity:.2f} | "
        f"{m.perplexity.n_tokens:,} |"
        for name, m in results.items()
    ]
    head = ["| | loss, nats a token | perplexity | tokens |", "|---|---|---|---|"]
    return ["## Perplexity", "", told.measured_on, "", *head, *rows]


def _table(results: dict[str, ExactMatch]) -> list[str]:
    columns = list(results)
    last = results[columns[-1]]
    rows = [
        "| task | n | " + " | ".join(columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for task, n in last.n_per_task.items():
        shares = " | ".join(percent(results[column].per_task[task]) for column in columns)
        rows.append(f"| {task} | {n} | {shares} |")
    overall = " | ".join(percent(results[column].overall) for column in columns)
    return [*rows, f"| all | {last.n} | {overall} |"]
