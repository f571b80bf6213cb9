"""Fine-tuning on all forms of rows, with old data, from Python and from the command line."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mamba3 import Mamba3Config, Mamba3LM, hub, load_tokenizer
from mamba3.cli import main
from mamba3.data import rows
from mamba3.data.byte_tokenizer import ByteTokenizer
from mamba3.eval.exact_match import exact_match
from mamba3.train import Recipe, finetune
from mamba3.train.finetune import finetune_recipe
from mamba3.train.step import TrainStep
from mamba3.train.tasks.rows import OLD, PromptRows, mask_text

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ROWS = {
    "text": [{"text": f"{word} is a number"} for word in WORDS],
    "prompt": [{"prompt": word, "completion": word[::-1]} for word in WORDS],
    "messages": [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w[::-1]}]}
        for w in WORDS
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of bytes that has learned nothing."""
    folder = tmp_path_factory.mktemp("models") / "base"
    torch.manual_seed(0)
    config = Mamba3Config(vocab_size=259, d_model=16, n_layer=2, d_state=8, headdim=8)
    hub.save_pretrained(Mamba3LM(config), folder, tokenizer=ByteTokenizer())
    return folder


@pytest.fixture
def write(tmp_path):
    def write(lines, name="rows.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


@pytest.fixture
def steps_made(monkeypatch):
    """The parts of every step."""
    made = []

    def run(self, parts, original=TrainStep.run):
        made.append(list(parts))
        return original(self, parts)

    monkeypatch.setattr(TrainStep, "run", run)
    return made


@pytest.mark.parametrize("form", ROWS)
def test_every_form_is_learned_and_measured(base, write, tmp_path, form, read_metrics):
    out = tmp_path / "out"
    options = {"steps": 8, "lr": 0.02, "eval_every": 4, "device": "cpu", "progress": False}
    result = finetune(base, write(ROWS[form]), out, **options)
    assert result.eval_loss_after < result.eval_loss_before - 0.2
    lines = [line for line in read_metrics(out) if "eval_loss" in line]
    assert [line["step"] for line in lines] == [0, 4, 8]
    assert [lines[0]["eval_loss"], lines[-1]["eval_loss"]] == [
        result.eval_loss_before,
        result.eval_loss_after,
    ]

    recipe = finetune_recipe(base, tmp_path / "rows.jsonl", steps=8, device="cpu")
    task, model = PromptRows(recipe), Mamba3LM.from_pretrained(out)
    assert task.measure(model).perplexity.loss == pytest.approx(result.eval_loss_after, rel=1e-6)
    total = count = 0
    for document in task.valid_documents:
        ids, labels = (torch.tensor([list(part)]) for part in document)
        n = int((labels[:, 1:] != -100).sum())
        total, count = total + model(ids, labels=labels).loss.item() * n, count + n
    assert total / count == pytest.approx(result.eval_loss_after, rel=1e-5)

    for sample, document in zip(lines[-1]["samples"], task.valid_documents, strict=False):
        whole = ByteTokenizer().decode(document.input_ids)
        start = sample["prompt"]
        if form == "text":
            assert start == whole[:15]  # and bos
        else:
            answer = ByteTokenizer().decode(i for i in document.labels if i != -100)
            assert whole.rstrip() == start + answer
        assert isinstance(sample["gave"], str)
    assert (result.exact_match_after is None) == (form != "prompt")
    if form == "prompt":
        measured = exact_match(model, ByteTokenizer(), task.problems)
        assert lines[-1]["exact_match"] == measured.overall == result.exact_match_after
    tokenizer = load_tokenizer(out)
    assert (tokenizer.chat_template is not None) == (form == "messages")
    assert "8 steps of 32 rows" in ModelCard.load(out / "README.md").text


def test_the_loss_is_on_answers_or_on_all(base, write, steps_made, tmp_path):
    path = write(ROWS["prompt"])
    for loss_on in ("answers", "all"):
        options = {"steps": 1, "loss_on": loss_on, "batch_size": 8, "device": "cpu"}
        finetune(base, path, tmp_path / loss_on, progress=False, **options)
    [[answers], [everything]] = steps_made
    assert torch.equal(answers.input_ids, everything.input_ids)
    real = everything.labels != -100
    assert torch.equal(everything.labels[real], everything.input_ids[real])
    for ids, labels in zip(answers.input_ids.tolist(), answers.labels.tolist(), strict=True):
        text = ByteTokenizer().decode(i for i in ids if i != 0)
        answer = ByteTokenizer().decode(i for i in labels if i != -100)
        assert text == answer[::-1] + answer


def test_files_are_read_once(base, write, tmp_path, monkeypatch):
    read = []

    def read_records(path, original=rows.read_records):
        read.append(path)
        return original(path)

    monkeypatch.setattr(rows, "read_records", read_records)
    path = write(ROWS["prompt"])
    finetune(base, path, tmp_path / "out", epochs=30, pack=16, device="cpu", progress=False)
    assert read == [path]


def test_a_folder_says_what_is_measured_on(base, write, steps_made, tmp_path):
    write(ROWS["prompt"][:7], "set/train.jsonl")
    write(ROWS["prompt"][7:], "set/valid.jsonl")
    out = tmp_path / "out"
    options = {"steps": 3, "batch_size": 7, "device": "cpu", "progress": False}
    result = finetune(base, tmp_path / "set", out, **options)
    assert (result.n_train, result.n_valid) == (7, 3)
    seen = {tuple(ids) for [part] in steps_made for ids in part.input_ids.tolist()}
    texts = {ByteTokenizer().decode(i for i in ids if i) for ids in seen}
    assert texts == {w + w[::-1] for w in WORDS[:7]}
    card = ModelCard.load(out / "README.md").text
    assert "on 7 rows of set, from base" in card
    assert "Measured on 3 rows of valid.jsonl and never trained on" in card


def test_rows_too_long_to_pack_are_cut_or_dropped_and_told(base, write, caplog):
    long = [{"prompt": w, "completion": w * (9 if w == "ten" else 1)} for w in WORDS]
    path = write(long, "set/train.jsonl").parent
    write(ROWS["prompt"][:2], "set/valid.jsonl")
    n = len(WORDS) - 2  # rows that are measured on are not trained on
    for how, lengths in (("cut", [24]), ("drop", [])):
        task = PromptRows(finetune_recipe(base, path, pack=24, too_long=how, epochs=96))
        found = [len(d.input_ids) for d in task.train_documents if len(d.input_ids) > 12]
        assert found == lengths
        assert len(task.train_documents) == n - 1 + len(lengths)
        gone = "" if lengths else "; 1 of them are left out"
        assert f"1 of {n} are too long for 24 tokens{gone}" in task.about
        caplog.clear()
        stream = task.stream()
        assert f"1 of {n} are too long for 24 tokens{gone}" in caplog.text
        assert stream(0).input_ids.shape == (32, 24)
        assert task.recipe.train.steps == 3 * stream.n_rows
    with pytest.raises(ValueError, match="nothing is left to train on: 8 of 8 rows"):
        PromptRows(finetune_recipe(base, path, pack=2, steps=1))


@pytest.mark.parametrize("pack", [None, 16])
def test_old_data_is_mixed_in_and_measured(write, tmp_path, steps_made, pack):
    new = [{"prompt": f"x{n}", "completion": str(n)} for n in range(20)]
    old = write([{"prompt": f"y{n}", "completion": "1"} for n in range(12)], "before.jsonl")
    options = {"steps": 2, "batch_size": 10, "pack": pack, "device": "cpu", "progress": False}
    for mix_data in (old, "arithmetic"):
        steps_made.clear()
        out = tmp_path / f"mixed-{str(mix_data)[-4:]}"
        result = finetune("arithmetic-tiny", write(new), out, mix=0.3, mix_data=mix_data, **options)
        tokenizer = load_tokenizer(out)
        for [part] in steps_made:
            texts = [tokenizer.decode(ids) for ids in part.input_ids.view(10, -1).tolist()]
            assert ["x" in text for text in texts] == [True] * 7 + [False] * 3
            assert all("y" in text for text in texts[7:]) == (mix_data == old)
        recipe = finetune_recipe(
            "arithmetic-tiny", tmp_path / "rows.jsonl", mix=0.3, mix_data=mix_data, steps=2
        )
        task, model = PromptRows(recipe), Mamba3LM.from_pretrained(out)
        assert all(p.task.startswith(OLD) for p in task.old.problems)
        assert result.old_after == exact_match(model, tokenizer, task.old.problems).overall
        assert result.exact_match_after == exact_match(model, tokenizer, task.problems).overall
        assert (result.old_before > 0.98) == (mix_data == "arithmetic")
        assert "Tasks that begin with 'old ' are those of" in (out / "README.md").read_text()


def test_problems_that_are_mixed_in_are_those_of_the_model(base, write, tmp_path):
    """Its stages, and numbers written as it reads them."""
    folder = tmp_path / "skill"
    Mamba3LM.from_pretrained(base).save_pretrained(folder, tokenizer=load_tokenizer(base))
    data = {"stages": [2, 4], "operands": "interleaved", "answer_order": "lsd_first", "digits": 3}
    recipe = {"data": data, "optim": {"lr": 1e-3}, "train": {"steps": 1, "init_from": "./before"}}
    (folder / "recipe.yaml").write_text(Recipe.from_dict(recipe).to_yaml())
    options = {"mix": 0.3, "mix_data": "arithmetic", "steps": 2}
    mixed = finetune_recipe(folder, write(ROWS["prompt"]), **options).data
    assert {name: getattr(mixed, name) for name in data} == data


def test_a_run_that_stopped_is_resumed(base, write, tmp_path, read_metrics):
    path, out = write(ROWS["prompt"]), tmp_path / "out"
    options = {"steps": 6, "device": "cpu", "changes": {"train.save_every": 3}, "progress": False}
    first = finetune(base, path, out, **options)
    weights = (out / "model.safetensors").read_bytes()
    lines = read_metrics(out, training=True)
    for file in (out / "checkpoints" / "step-00000006").iterdir():
        file.unlink()
    (out / "checkpoints" / "step-00000006").rmdir()
    (out / "model.safetensors").unlink()
    again = finetune(base, path, out, resume=True, **options)
    assert (out / "model.safetensors").read_bytes() == weights
    assert read_metrics(out, training=True) == lines
    assert again._replace(seconds=0) == first._replace(seconds=0)


def test_any_key_of_a_recipe_can_be_changed(base, write):
    path = write(ROWS["prompt"])
    changes = {"optim.name": "hybrid", "optim.warmup_steps": 3, "step.recompute": "full"}
    recipe = finetune_recipe(base, path, steps=20, precision="bf16", changes=changes)
    assert (recipe.optim.name, recipe.step.recompute, recipe.step.precision) == (
        "hybrid",
        "full",
        "bf16",
    )
    assert (recipe.optim.warmup_steps, recipe.optim.decay_steps) == (3, 20)
    with pytest.raises(TypeError, match="lr"):
        finetune_recipe(base, path, changes={"optim.lrr": 1.0})
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        finetune(base, path, "out", epoch=3)


def test_another_tokenizer_and_a_padded_vocabulary(base, write, tmp_path):
    """A tokenizer.json of the library, for a model with more ids than it has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=240,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()[:200],
    )
    tokenizer.train_from_iterator([row["text"] for row in ROWS["text"]], trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    path, out = write(ROWS["text"]), tmp_path / "out"
    options = {"steps": 1, "device": "cpu", "progress": False}
    result = finetune(base, path, out, tokenizer=str(folder), **options)
    assert load_tokenizer(out).encode("one is a number") == tokenizer.encode("one is a number").ids
    task = PromptRows(finetune_recipe(base, path, tokenizer=str(folder), steps=1))
    assert task.vocab_size < 259
    [document, *_] = task.train_documents
    assert document.input_ids[-1] == tokenizer.token_to_id("<|end|>")
    shown = mask_text(document, task.tokenizer)
    first, rest = shown[: shown.index("[")], shown[shown.index("[") + 1 :]
    assert any(first + rest == f"{word} is a number<|end|>]" for word in WORDS)
    model = Mamba3LM.from_pretrained(out)
    assert task.measure(model).perplexity.loss == pytest.approx(result.eval_loss_after, rel=1e-6)


# The command


def test_show_mask(base, write, capsys):
    write(ROWS["messages"][:3], "set/train.jsonl")
    data = write(ROWS["messages"][3:], "set/valid.jsonl").parent
    command = ["finetune", "--model", str(base), "--data", str(data)]
    assert main([*command, "--show-mask", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"<|bos|><|user|>\\n{word}\\n<|assistant|>\\n[{word[::-1]}<|eos|>]\\n" for word in WORDS[:2]
    ]
    assert main(command) == 2
    assert "--out DIR is needed" in capsys.readouterr().err
    document = PromptRows(finetune_recipe(base, data, steps=1)).train_documents[0]
    coloured = mask_text(document, ByteTokenizer(), colour=True)
    assert "\033[32meno<|eos|>\033[0m" in coloured


def test_dry_run(base, write, capsys, tmp_path):
    data = write([{"q": w, "a": w[::-1]} for w in WORDS])
    command = ["finetune", "--model", str(base), "--data", str(data), "--out", str(tmp_path / "x")]
    command += ["--columns", "prompt=q", "completion=a", "--epochs", "32", "--device", "cpu"]
    assert main([*command, "--set", "optim.eps=1e-6", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    recipe = finetune_recipe(base, data, columns={"prompt": "q", "completion": "a"}, steps=1)
    words = [row.content[0] for row in recipe.data.rows.train]
    assert (told["rows"], told["valid_rows"]) == (len(words), len(WORDS) - len(words))
    assert told["steps"] == len(words)
    assert told["tokens"] == sum(2 * len(word) + 2 for word in words)
    assert told["scored_tokens"] == sum(len(word) + 1 for word in words)
    assert told["recipe"]["optim"]["eps"] == 1e-6
    n_bytes = sum(p.numel() * 4 for p in Mamba3LM.from_pretrained(base).parameters())
    assert told["memory"] > 4 * n_bytes  # weights, gradients and AdamW's two
    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"{told['tokens']:,} tokens, {told['scored_tokens']:,} of them" in printed
    assert "memory of the steps on a GPU: " in printed
    assert not (tmp_path / "x").exists()


def test_the_command_tells_both_skills_and_how_to_push(write, capsys, tmp_path):
    data = write([{"prompt": f"x{n}", "completion": str(n)} for n in range(20)])
    command = ["finetune", "--model", "arithmetic-tiny", "--data", str(data), "--device", "cpu"]
    command += ["--out", str(tmp_path / "x"), "--steps", "2", "--batch-size", "10"]
    assert main([*command, "--mix", "0.1", "--mix-data", "arithmetic"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("old skill: before 99.") for line in lines)
    assert lines[-1] == f"to the Hub: mamba3 push {tmp_path / 'x'} ORG/NAME"
    assert main([*command, "--columns", "prompt"]) == 2
    assert "expected KEY=VALUE, such as prompt=question, got 'prompt'" in capsys.readouterr().err
