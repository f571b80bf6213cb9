"""The command line against the library that it calls."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

import mamba3
from mamba3 import load_model, load_tokenizer
from mamba3.cli import build_parser, main
from mamba3.commands.quickstart import is_quickstart
from mamba3.data import arithmetic
from mamba3.data.arithmetic_tasks import TASKS
from mamba3.data.jsonl import read_rows, split_rows
from mamba3.data.text import TokenFile
from mamba3.eval.exact_match import exact_match, percent
from mamba3.optim import ParamGroupEngine
from mamba3.train.checkpoint import Checkpoints

ROOT = Path(__file__).parent.parent
DEBUG = str(ROOT / "configs" / "debug.yaml")
COMMANDS = ["quickstart", "solve", "generate", "chat", "train", "curriculum", "plot", "profile"]
COMMANDS += ["finetune", "tokenize"]
COMMANDS += ["eval", "convert", "info", "list", "push", "doctor"]
# Where the module of a command is not named after it.
MODULES = {"eval": "evaluate", "list": "list_models"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a briefly trained model."""
    out = str(tmp_path_factory.mktemp("cli") / "run")
    assert main(["train", DEBUG, "--out", out, "--set", "train.steps=40"]) == 0
    return out


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of prompt/completion rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"prompt": f"y{n}", "completion": f"{n}0"[::-1]} for n in range(10, 70)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def last_json(text):
    return json.loads(text.splitlines()[-1])


# The parser


def examples():
    """The example command of every command's help, as arguments."""
    actions = build_parser()._subparsers._group_actions[0].choices
    for name, parser in actions.items():
        lines = parser.format_help().splitlines()
        yield name, shlex.split(lines[lines.index("example:") + 1])


def test_every_command_has_help_with_an_example_that_parses():
    found = dict(examples())
    assert list(found) == COMMANDS
    for name, arguments in found.items():
        assert arguments[:2] == ["mamba3", name]
        assert (
            build_parser().parse_args(arguments[1:]).run.__module__
            == f"mamba3.commands.{MODULES.get(name, name)}"
        )


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    expected = f"mamba3 {mamba3.__version__} (torch {metadata.version('torch')})\n"
    assert capsys.readouterr().out == expected


def test_module_and_script_are_the_same():
    script = Path(sys.executable).parent / "mamba3"
    outputs = [
        subprocess.run([*command, "generate", "--help"], capture_output=True, check=True).stdout
        for command in ([sys.executable, "-m", "mamba3"], [script])
    ]
    assert outputs[0] == outputs[1] != b""


# generate


def test_generate_a_batch_equals_the_library(trained, capsys):
    tokenizer, model = load_tokenizer(trained), load_model(trained)
    expected = []
    for prompt in ("8+7", "c1203=", "r5"):
        ids = torch.tensor([tokenizer.encode_prompt(prompt)])
        out = model.generate(ids, 6, eos_token_id=tokenizer.eos_token_id)
        expected.append(tokenizer.decode(out[0]))
    assert [text.partition("=")[0] for text in expected] == ["8+7", "c1203", "r5"]
    assert main(["generate", "--model", trained, "8+7", "c1203=", "r5", "--max-new-tokens=6"]) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_generate_passes_the_options_of_sampling(trained, capsys):
    tokenizer = load_tokenizer(trained)
    ids = torch.tensor([tokenizer.encode_prompt("c1234")])
    options = {
        "temperature": 2.5,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "seed": 4,
    }
    out = load_model(trained).generate(ids, 30, eos_token_id=tokenizer.eos_token_id, **options)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["generate", "--model", trained, "c1234", "--max-new-tokens", "30", *flags]) == 0
    assert capsys.readouterr().out == tokenizer.decode(out[0]) + "\n"


def test_generate_one_prompt_prints_tokens_as_they_come(trained, monkeypatch, capsys):
    printed = []
    step = mamba3.Mamba3LM.step

    def spy(self, ids, state):
        printed.append(capsys.readouterr().out)
        return step(self, ids, state)

    monkeypatch.setattr(mamba3.Mamba3LM, "step", spy)
    options = ["--temperature", "5", "--seed", "2", "--max-new-tokens", "8"]
    assert main(["generate", "--model", trained, "c12", *options]) == 0
    assert len(printed) > 2
    assert printed[0][:-1] == "c12="
    assert all(len(text) <= 1 for text in printed[1:])


# train, finetune, eval


def test_train_json_and_resume(tmp_path, capsys):
    out = tmp_path / "run"
    common = ["--out", str(out), "--json", "--set", "data.eval_problems=8"]
    assert main(["train", DEBUG, *common, "train.steps=4"]) == 0
    first = last_json(capsys.readouterr().out)
    assert first["steps"] == 4
    assert first["out"] == str(out)
    assert main(["train", DEBUG, *common, "train.steps=6", "--resume"]) == 0
    result = last_json(capsys.readouterr().out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == result["steps"] == 6
    assert losses[3] == first["loss"]
    assert losses[5] == result["loss"]


def test_finetune_json(trained, rows, tmp_path, capsys):
    out = str(tmp_path / "tuned")
    command = ["finetune", "--model", trained, "--data", rows, "--out", out, "--device", "cpu"]
    settings = ["--epochs", "2", "--batch-size", "8", "--lr", "1e-3", "--seed", "3"]
    assert main([*command, *settings, "--valid-fraction", "0.3", "--json"]) == 0
    result = last_json(capsys.readouterr().out)
    assert result["out"] == out
    assert result["n_train"] + result["n_valid"] == 60
    assert result["steps"] == round(2 * result["n_train"] / 8)
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("lr", 0) for line in lines) == pytest.approx(1e-3)

    tuned, tokenizer = load_model(out), load_tokenizer(out)
    assert not torch.equal(tuned.lm_head.weight, load_model(trained).lm_head.weight)
    _, valid = split_rows(read_rows(rows, tokenizer), 0.3)
    assert result["exact_match_after"] == exact_match(tuned, tokenizer, valid).overall
    before = exact_match(load_model(trained), tokenizer, valid).overall
    assert result["exact_match_before"] == before

    assert main([*command, "--steps", "1"]) == 2
    assert "already holds" in capsys.readouterr().err
    assert main([*command, "--steps", "1", "--overwrite"]) == 0
    assert f"saved to {out}" in capsys.readouterr().out


def test_tokenize(trained, tmp_path, capsys):
    """JSONL and lines of text, by a model's tokenizer; a bad line stops it, or is left out."""
    source = tmp_path / "rows.jsonl"
    source.write_text('{"body": "8+7=15"}\n{"text": "1"}\n{"body": "hello"}\n')
    (tmp_path / "more.txt").write_text("c12\n\nr1\n")
    command = ["tokenize", str(source), str(tmp_path / "more.txt"), "--tokenizer", trained]
    command += ["--out", str(tmp_path / "data" / "c"), "--field", "body", "--lines"]
    assert main(command) == 2
    assert "rows.jsonl, line 2: the key 'body' is missing" in capsys.readouterr().err
    assert main([*command, "--skip-bad", "--json"]) == 0
    result = last_json(capsys.readouterr().out)
    corpus, tokenizer = TokenFile(result["path"]), load_tokenizer(trained)
    found = [tokenizer.decode(corpus.document(i)) for i in range(corpus.n_documents)]
    assert found == ["8+7=15", "c12", "r1"]
    assert (result["n_documents"], result["n_tokens"], result["n_skipped"]) == (3, 17, 2)
    assert main([*command, "--skip-bad"]) == 2
    assert "exists; choose another name, or overwrite" in capsys.readouterr().err
    assert main([*command, "--skip-bad", "--overwrite"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 documents, 17 tokens",
        f"saved to {tmp_path / 'data' / 'c'}.bin",
    ]


def test_eval_of_the_curriculum(trained, capsys):
    assert main(["eval", "--model", trained, "--n", "12", "--json"]) == 0
    found = last_json(capsys.readouterr().out)
    problems = [p for stage in (1, 2) for p in arithmetic.eval_problems(stage, 12)]
    expected = exact_match(load_model(trained), load_tokenizer(trained), problems)
    assert found["exact_match"] == expected.overall
    assert found["per_task"] == expected.per_task
    assert found["n"] == len(problems) == 212
    assert main(["eval", "--model", trained, "--n", "12", "--stages", "3", "2"]) == 0
    output = capsys.readouterr().out
    assert "exact match on 212 problems" in output
    assert "chain" in output
    assert "copy" not in output


def test_eval_of_a_model_without_a_recipe_is_of_every_stage(trained, tmp_path, capsys):
    load_model(trained).save_pretrained(tmp_path / "m", tokenizer=load_tokenizer(trained))
    assert main(["eval", "--model", str(tmp_path / "m"), "--n", "3", "--json"]) == 0
    tasks = set(last_json(capsys.readouterr().out)["per_task"])
    assert tasks == set(TASKS)


def test_eval_of_a_file(trained, rows, capsys):
    assert main(["eval", "--model", trained, "--data", rows, "--n", "7", "--json"]) == 0
    found = last_json(capsys.readouterr().out)
    tokenizer = load_tokenizer(trained)
    expected = exact_match(load_model(trained), tokenizer, read_rows(rows, tokenizer)[:7])
    assert (found["n"], found["exact_match"]) == (7, expected.overall)
    assert found["misses"][0]["answer"] == expected.misses[0].answer


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.00 %"), (1 - 1e-5, "99.99 %"), (1, "100.00 %"), (0.29, "29.00 %"), (2 / 3, "66.66 %")],
)
def test_shares_are_rounded_down(share, text):
    assert percent(share) == text


# info, list


def test_info(trained, capsys, monkeypatch):
    monkeypatch.setenv("MAMBA3_BACKEND", "reference")
    assert main(["info", trained]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    model = load_model(trained)
    n = sum(parameter.numel() for parameter in model.parameters())
    assert facts["parameters"] == f"{n:,}"
    assert facts["weights"] == f"{4 * n / 1000:.4g} KB (float32)"
    heads, headdim, d_state, angles = 4, 16, 16, 4
    a_layer = heads * (angles + headdim * d_state + d_state + headdim)
    assert facts["state"].startswith(f"{2 * 4 * a_layer / 1000:.4g} KB per sequence")
    assert facts["backend"].startswith("reference: ")
    assert facts["form"] == "SISO, 2 layers of 4 heads"
    assert facts["d_state"] == "16"


def test_info_of_the_optimizer(trained, capsys):
    assert main(["info", trained, "--optimizer"]) == 0
    assert capsys.readouterr().out == ParamGroupEngine(load_model(trained)).plan() + "\n"


@pytest.mark.filterwarnings("default")
def test_info_of_an_official_folder_warns_in_one_line(capsys):
    golden = next(path for path in (ROOT / "tests/assets/goldens").iterdir() if path.is_dir())
    assert main(["info", str(golden)]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("mamba3: warning: ")
    assert "a_activation='heavy_tail'" in line


def test_list(capsys):
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    for name in mamba3.list_models(shipped=True):
        n = sum(parameter.numel() for parameter in load_model(name).parameters())
        assert f"{name}  {n:,} parameters" in output


# errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "no-such", "1"], "'no-such' is neither"),
        (["generate", "--model", "{model}", "hello"], "character 'h' at position 0"),
        (["generate", "--model", "{model}", "1", "--top-p=2", "--temperature=1"], "top_p must be"),
        (["generate", "--model", "{model}", "1", "--max-new-tokens=0"], "max_new_tokens must be"),
        (["train", "no-such.yaml", "--out", "{model}"], "no-such.yaml is not a file"),
        (["train", DEBUG, "--out", "{model}"], "already holds"),
        (["train", DEBUG, "--out", "{tmp}/x", "--set", "optim.lrr=1"], "nearest is 'optim.lr'"),
        (["train", DEBUG, "--out", "{tmp}/x", "--resume"], "no run to resume"),
        (
            ["finetune", "--model", "{model}", "--data", "{tmp}/bad.jsonl", "--out", "{tmp}/x"],
            "line 2",
        ),
        (["eval", "--model", "{model}", "--data", "{tmp}/bad.jsonl"], "line 2"),
        (["eval", "--model", "{model}", "--n", "0"], "--n must be at least 1, got 0"),
        (["info", "{tmp}"], "config.json"),
        (["info", "{tmp}/bad.jsonl"], "is a file"),
    ],
)
def test_errors_are_one_line(trained, tmp_path, capsys, arguments, message):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1", "completion": "2"}\n{"prompt": "1"}\n')
    arguments = [text.format(model=trained, tmp=tmp_path) for text in arguments]
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    assert line.startswith("mamba3: error: ")
    assert message in line
    assert not (tmp_path / "x").exists()


def test_debug_shows_the_error_itself(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither"):
        main(["info", "no-such", "--debug"])


def test_faults_of_the_program_are_not_hidden(trained, monkeypatch):
    monkeypatch.setattr("mamba3.zoo.load_model", lambda *_, **__: {}["fault"])
    with pytest.raises(KeyError, match="fault"):
        main(["info", trained])


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bogus"])
    assert stop.value.code == 2
    assert "quickstart" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mamba3", "list"]
    with open(writing, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c(tmp_path):
    """Interrupts a run: it saves its state, the exit code says so, and it can be resumed."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "mamba3", "train", DEBUG, "--out", str(out)]
    settings = ["--set", "train.steps=100000", "train.save_every=5", "train.eval_every=0"]
    process = subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out / "model.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    told = re.fullmatch(r"mamba3: stopped by SIGINT after step (\d+); .*", errors.splitlines()[-1])
    step = Checkpoints(out).load().step
    assert step == int(told[1]) >= 5
    more = ["--set", f"train.steps={step + 1}", "train.save_every=5", "train.eval_every=0"]
    assert main(["train", DEBUG, "--out", str(out), "--resume", *more]) == 0


# quickstart


def test_quickstart(quickstart):
    done = quickstart.done
    assert done.returncode == 0, done.stderr
    assert "8+7=15\n" in done.stdout
    assert quickstart.seconds < 120
    before, after = (
        float(done.stdout.partition(f"{word} ")[2].partition(" %")[0])
        for word in ("before", "after")
    )
    assert before < 30  # some are sorted already
    assert after > 90
    files = {path.name for path in (quickstart.shell.folder / "mamba3-quickstart").iterdir()}
    assert files >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}


def test_quickstart_replaces_its_own_folder_only(quickstart, trained):
    assert is_quickstart(quickstart.shell.folder / "mamba3-quickstart")
    assert not is_quickstart(Path(trained))
    again = quickstart.shell(f"mamba3 quickstart --out {trained}")
    assert again.returncode == 2
    assert "already holds" in again.stderr


def test_quickstart_again(quickstart):
    again = quickstart.shell("mamba3 quickstart")
    assert again.returncode == 0, again.stderr

    def without_times(text):
        return [line for line in text.splitlines() if " steps in " not in line]

    assert without_times(again.stdout) == without_times(quickstart.done.stdout)
