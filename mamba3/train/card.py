"""The model card (README.md) of a folder: what the model is, measured numbers, how to use it.

A card says only what is known: what was not measured or stated is named as such.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    told: Told | None = None,
    results: dict[str, Measured] | None = None,
    base_model: str | None = None,
    licence: str | None = None,
    datasets: Sequence[str] = (),
    limits: str | None = None,
    evaluation: str | None = None,
    asked: str | None = None,
) -> None:
    """Write the README.md of a model folder.

    Args:
        folder: the model's folder.
        model: the `Mamba3LM` in it.
        summary: what was trained, on what, how long, with which seed; or where the weights are
            from, as for a model that was converted or is random.
        told: of its data; None for a model that was not trained here.
        results: measurements, by column of the table, all of one kind, the last of this model;
            None or none at all says that nothing was measured.
        base_model: name of the model it was trained from.
        licence: of the weights, an SPDX identifier; None says that none is stated.
        datasets: ids on the Hub of what it was trained on.
        limits: what is known not to work, in whole sentences.
        evaluation: says what was measured in the place of the table of results.
        asked: a problem for `mamba3 solve`, of a model that ships.
    """
    folder, results = Path(folder), results or {}
    name = folder.resolve().name
    data = ModelCardData(
        license=None if licence is None else licence.lower(),
        library_name="mamba3",
        pipeline_tag="text-generation",
        tags=["mamba3", *([] if told is None else told.tags)],
        datasets=list(datasets) or None,
        base_model=base_model,
        model_name=name if results else None,  # of the entry that holds the results
        eval_results=_eval_results(list(results.values())[-1]) if results else None,
    )
    config = model.config
    n_parameters = sum(p.numel() for p in model.parameters())
    sections = {
        "": f"A {_family(config)} language model ({config.form}, {config.n_layer} layers, d_model "
        f"{config.d_model}, d_state {config.d_state}, {n_parameters:,} parameters).",
        "Origin" if told is None else "Training": summary,
        "Evaluation": evaluation or _measured(told, results),
        "Architecture": _architecture(model),
        "Limits": " ".join(filter(None, [limits, _limits(bool(results))])),
        "Licence": _licence(licence, base_model),
        "Use": "\n".join(
            [
                *_solving(name, asked),
                *["```python", *_usage(name, told), "```"],
            ]
        ),
    }
    body = "\n\n".join(
        f"## {title}\n\n{text}" if title else f"# {name}\n\n{text}"
        for title, text in sections.items()
    )
    replace_text(folder / CARD_FILE, f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def _family(config) -> str:
    return "Mamba-3" if "mamba3" in config.kinds else "Mamba"


def _architecture(model) -> str:
    config = model.config
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    facts = {
        "form": config.form,
        "layers": config.n_layer,
        "width (d_model)": config.d_model,
    }
    if "mamba3" in config.kinds:
        facts |= {
            "heads": f"{config.n_heads} of {config.headdim} channels, {config.ngroups} groups of "
            "B, C",
            "state (d_state)": f"{config.d_state} a channel, {2 * config.n_angles} of them rotate",
            "norm before the gate": "yes" if config.is_outproj_norm else "no",
            "decay (a_activation)": config.a_activation,
        }
    if "mamba" in config.kinds:
        sizes = config.mamba
        facts["Mamba-1 layers"] = (
            f"{sizes.expand * config.d_model} channels, a state of {sizes.d_state} each, "
            f"convolution over {sizes.d_conv}"
        )
    facts |= {
        "MLP": f"width {config.mlp_width}" if config.mlp_width else "none",
        "vocabulary": f"{config.vocab_size:,}, padded to {config.padded_vocab_size:,}",
        "head": "tied to the embedding" if config.tie_embeddings else "of its own",
        "weights": ", ".join(dtypes),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items())])


def _limits(measured: bool) -> str:
    if measured:
        return (
            "What the model does on other data than that of the table was not measured, nor "
            "whether its output is true, safe or free of bias."
        )
    return "Nothing was measured: not its quality, nor whether its output is true or safe."


def _licence(licence: str | None, base_model: str | None) -> str:
    stated = f"{licence}." if licence else "None is stated for these weights."
    base = "" if base_model is None else f" They are trained from {base_model}: its licence holds."
    return stated + base


def _eval_results(measured: Measured) -> list[EvalResult]:
    """In the Hub's form."""
    if measured.exact_match is None:
        told = measured.perplexity
        metrics = {"perplexity": told.perplexity}
        if (bits := getattr(told, "bits_per_byte", None)) is not None:
            metrics["bits_per_byte"] = bits
        return [
            EvalResult(
                task_type="text-generation",
                dataset_type="text",
                dataset_name="held-out text",
                dataset_args={"n_tokens": told.n_tokens},
                metric_type=metric,
                metric_value=value,
            )
            for metric, value in metrics.items()
        ]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="problems",
            dataset_name=f"problems of the task {task}",
            dataset_config=task,  # what keeps the results of tasks apart
            dataset_args={"n": measured.exact_match.n_per_task[task]},
            metric_type="exact_match",
            metric_value=share,
        )
        for task, share in measured.exact_match.per_task.items()
    ]


def _solving(name: str, problem: str | None) -> list[str]:
    if problem is None:
        return []
    return [f'`mamba3 solve --model {name} "{problem}"` takes and gives the natural form.', ""]


def _usage(name: str, told: Told | None) -> list[str]:
    if told is not None and told.solved is not None:
        return [
            "from mamba3.solve import solve",
            "",
            f'print(solve([{json.dumps(told.solved)}], "{name}")[0].answer)',
        ]
    if told is None or told.example is None:
        return [
            "import torch",
            "from mamba3 import load_model",
            "",
            f'model = load_model("{name}")',
            "prompt = torch.tensor([[0]])  # ids of the model's tokenizer",
            "print(model.generate(prompt, 16)[0].tolist())",
        ]
    quoted = json.dumps(told.example, ensure_ascii=False)
    return [
        "import torch",
        "from mamba3 import load_model, load_tokenizer",
        "",
        f'model = load_model("{name}")',
        f'tokenizer = load_tokenizer("{name}")',
        f"prompt = torch.tensor([tokenizer.encode_prompt({quoted})])",
        "output = model.generate(prompt, 16, eos_token_id=tokenizer.eos_token_id)",
        "print(tokenizer.decode(output[0]))",
    ]


def _measured(told: Told | None, results: dict[str, Measured]) -> str:
    if not results:
        return "Not measured. `mamba3 eval FOLDER --perplexity FILE` measures it on texts."
    one_run = "The numbers are of these weights, one run; measuring draws nothing at random."
    measured_on = "" if told is None else f"{told.measured_on} "
    exact = {name: measured.exact_match for name, measured in results.items()}
    if None not in exact.values():
        how = "Exact match of greedy generation, whole answer and end token."
        return "\n".join([f"{how} {measured_on}{one_run}", "", *_exact_match_table(exact)])
    table = _perplexity_table({name: measured.perplexity for name, measured in results.items()})
    return "\n".join([f"Perplexity. {measured_on}{one_run}", "", *table])


def _perplexity_table(results: dict) -> list[str]:
    bits = {name: getattr(told, "bits_per_byte", None) for name, told in results.items()}
    by_bytes = None not in bits.values()
    head = ["", "loss, nats a token", "perplexity", "tokens"]
    rows = [head + ["bits per byte"] * by_bytes, ["---"] * (len(head) + by_bytes)]
    for name, told in results.items():
        row = [name, f"{told.loss:.4f}", f"{told.perplexity:.2f}", f"{told.n_tokens:,}"]
        rows.append(row + [f"{bits[name]:.4f}"] if by_bytes else row)
    return [f"| {' | '.join(row)} |" for row in rows]


def _exact_match_table(results: dict[str, ExactMatch]) -> list[str]:
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
