"""What is built on transformers, with our classes: pipelines, Trainer, peft, code on the Hub."""

import json
import os
import subprocess
import sys

import peft
import pytest
import torch
import transformers
from compare import DEVICE, TOLERANCE, assert_close, assert_same, randomise

import mamba3
from mamba3 import Mamba3Config, Mamba3LM
from mamba3.hf import Mamba3ForCausalLM, export
from mamba3.hub import load_pretrained, save_pretrained
from mamba3.zoo import resolve

TINY = {"vocab_size": 16, "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8}


def language_model():
    return randomise(Mamba3LM(Mamba3Config(**TINY))).eval()


def test_the_pipeline_answers_as_mamba3_does():
    """Batched with left padding, from the folder of a shipped model and its tokenizer.json."""
    folder = resolve("arithmetic-tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device=DEVICE)
    questions = ["8+7=", "c4711=", "9-4="]
    options = {"eos_token_id": tokenizer.eos_token_id, "max_new_tokens": 8, "do_sample": False}
    out = pipe(questions, batch_size=3, return_full_text=False, **options)
    ours, shipped = mamba3.load_tokenizer("arithmetic-tiny"), mamba3.load_model("arithmetic-tiny")
    for question, (answer,) in zip(questions, out, strict=True):
        ids = torch.tensor([ours.encode_prompt(question)])
        expected = shipped.generate(ids, 8, eos_token_id=ours.eos_token_id)[0, ids.shape[1] :]
        assert answer["generated_text"] == ours.decode(expected)
    assert out[0][0]["generated_text"] == "15"


@pytest.fixture
def training(tmp_path):
    """Arguments of Trainer: rows of tokens that count, to be learnt in a few steps."""
    rows = [(torch.arange(12) + start) % 16 for start in range(16)]
    fields = transformers.TrainingArguments.__dataclass_fields__
    # The name that transformers has had since 5.23.
    name = "activation" if "activation_checkpointing" in fields else "gradient"
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=30,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        **{f"{name}_checkpointing": True},
        logging_steps=10,
        save_steps=30,
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        dataloader_pin_memory=False,
    )
    return {"args": arguments, "train_dataset": [{"input_ids": r, "labels": r} for r in rows]}


def test_trainer_trains_it_and_mamba3_loads_the_checkpoint(training):
    torch.manual_seed(0)
    model = Mamba3ForCausalLM.from_mamba3(Mamba3LM(Mamba3Config(**TINY)))
    trainer = transformers.Trainer(model, **training, eval_dataset=training["train_dataset"])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] > 1
    assert losses[-1] < 0.2 * losses[0]
    ids = torch.stack([row["input_ids"] for row in training["train_dataset"]]).to(DEVICE)
    with torch.no_grad():
        expected = model.eval()(ids, labels=ids).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    back = load_pretrained(f"{training['args'].output_dir}/checkpoint-30", device=DEVICE)
    assert_same(back.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_peft_trains_and_merges_it():
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["in_proj", "out_proj"], r=2)
    model = peft.get_peft_model(Mamba3ForCausalLM.from_mamba3(language_model()), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.arange(10).reshape(2, 5)
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    out.loss.backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if "lora_" in name)
    new = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    merged = model.merge_and_unload()
    assert_close(merged(ids).logits, out.logits, TOLERANCE[torch.float32])
    assert torch.equal(merged.generate(ids, max_new_tokens=5, do_sample=False), new)


def test_lm_eval_takes_an_instance():
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    folder = resolve("arithmetic-tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    judge = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    asked = [("8+7=", "15"), ("c471=", "47")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked)]
    shipped = mamba3.load_model("arithmetic-tiny")
    for (question, answer), (score, _) in zip(asked, judge.loglikelihood(requests), strict=True):
        ids = torch.tensor(tokenizer(question + answer).input_ids)
        log_p = shipped(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = log_p.gather(1, ids[1:, None])[-len(answer) :].sum().item()
        assert score == pytest.approx(expected, rel=1e-4)


def test_an_exported_folder_loads_where_mamba3_is_installed_and_not_imported(tmp_path):
    folder, again = tmp_path / "model", tmp_path / "again"
    model = language_model()
    save_pretrained(model, folder)
    export(folder)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits[0, -1].tolist()
    code = f"""
import json, torch
from transformers import AutoModelForCausalLM
for path in {[str(folder), str(again)]!r}:
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    with torch.no_grad():
        print(json.dumps(model(torch.arange(8)[None]).logits[0, -1].tolist()))
    model.save_pretrained({str(again)!r})
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * 2
    assert load_pretrained(folder).config == load_pretrained(again).config == model.config
