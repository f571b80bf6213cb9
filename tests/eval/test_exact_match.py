import pytest
import torch

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.data.arithmetic import eval_problems, tokenizer, well_formed
from mamba3.data.arithmetic_forms import Form
from mamba3.data.arithmetic_options import ProblemOptions
from mamba3.data.problems import BLANK, Problem
from mamba3.eval import exact_match as module
from mamba3.eval.exact_match import Miss, exact_match, scaled_accuracy

TOKENIZER = tokenizer()


def random_model():
    torch.manual_seed(0)
    config = Mamba3Config(
        vocab_size=TOKENIZER.vocab_size, d_model=16, n_layer=2, d_state=8, headdim=8
    )
    model = Mamba3LM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_score_by_hand(monkeypatch):
    said = {
        "1+1": "2$",
        "2+2": "5$",
        "5+5": "10$",
        "8+8": "161",  # right so far, but it does not stop
        "4-5": "-1$",
        "4-4": "$",
    }
    saying(said, monkeypatch)
    right = {"1+1": "2", "2+2": "4", "5+5": "10", "8+8": "16", "4-5": "-1", "4-4": "0"}
    problems = [Problem("add" if "+" in p else "subtract", p, a) for p, a in right.items()]
    result = exact_match(random_model(), TOKENIZER, problems, batch_size=4)
    assert result.overall == 3 / 6
    assert result.per_task == {"add": 2 / 4, "subtract": 1 / 2}
    assert (result.n, result.n_per_task) == (6, {"add": 4, "subtract": 2})
    assert result.truncated == 1
    assert result.misses == [
        Miss("add", "2+2", "4", "5"),
        Miss("add", "8+8", "16", "161"),
        Miss("subtract", "4-4", "0", ""),
    ]
    fewer = exact_match(random_model(), TOKENIZER, problems, max_misses=1)
    assert fewer.misses == result.misses[:1]


def saying(said, monkeypatch):
    """Have models answer prompts with texts; "$" is their end."""

    def generate(model, input_ids, max_new_tokens, *, attention_mask, eos_token_id, pad_token_id):
        new = []
        for row, mask in zip(input_ids, attention_mask.bool(), strict=True):
            prompt = TOKENIZER.decode(row[mask])
            assert prompt.endswith("=")
            answer = said[prompt[:-1]]
            ids = TOKENIZER.encode(answer.rstrip("$")) + [eos_token_id] * answer.endswith("$")
            new.append((ids + [pad_token_id] * max_new_tokens)[:max_new_tokens])
        return torch.cat([input_ids, torch.tensor(new)], dim=1)

    monkeypatch.setattr(module, "generate", generate)


def test_groups_form_and_chance(monkeypatch):
    said = {
        "12+9": "21$",
        "19+1": "20$",
        "19+9": "27$",
        "123+1": "1+4$",
        "p01": "1$",
        "p011": "111",
    }
    saying(said, monkeypatch)
    problems = [
        Problem("sum", "12+9", "21", (("digits", 2), ("carries", 1))),
        Problem("sum", "19+1", "20", (("digits", 2), ("carries", 1))),
        Problem("sum", "19+9", "28", (("digits", 2), ("carries", 1))),
        Problem("sum", "123+1", "124", (("digits", 3), ("carries", 0))),
        Problem("parity", "p01", "1", (("symbols", 2),)),
        Problem("parity", "p011", "0"),
    ]
    result = exact_match(
        random_model(), TOKENIZER, problems, chance={"parity": 0.2}, well_formed=well_formed
    )
    assert result.overall == 3 / 6
    assert result.per_task == {"sum": 2 / 4, "parity": 1 / 2}
    assert result.per_group == {
        "sum, 2 digits": 2 / 3, "sum, 1 carries": 2 / 3, "sum, 3 digits": 0, "sum, 0 carries": 0,
        "parity, 2 symbols": 1,
    }  # fmt: skip
    assert result.n_per_group == {
        "sum, 2 digits": 3, "sum, 1 carries": 3, "sum, 3 digits": 1, "sum, 0 carries": 1,
        "parity, 2 symbols": 1,
    }  # fmt: skip
    assert result.scaled == {"parity": pytest.approx((0.5 - 0.2) / 0.8)}
    assert (result.truncated, result.malformed) == (1, 2)
    assert problems[0].group == "sum, 2 digits, 1 carries"
    assert exact_match(random_model(), TOKENIZER, problems).malformed is None


@pytest.mark.parametrize(
    ("share", "chance", "scaled"), [(0.2, 0.2, 0), (1, 0.2, 1), (0.6, 0.2, 0.5), (0.25, 0.5, -0.5)]
)
def test_scaled_accuracy(share, chance, scaled):
    assert scaled_accuracy(share, chance) == pytest.approx(scaled)


def greedy(model, problem, budget):
    """What a model writes, one token at a time, into blanks and at the end."""
    ids, told = [TOKENIZER.bos_token_id], []

    def write():
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        told.append(ids[-1])

    for character in f"{problem.prompt}=":
        if problem.blanks and character == BLANK:
            write()
        else:
            ids += TOKENIZER.encode(character)
    for _ in range(budget):
        write()
        if told[-1] == TOKENIZER.eos_token_id:
            break
    return told


@pytest.mark.parametrize("operands", ["plain", "columns"])
def test_answers_are_those_of_greedy_decoding_one_by_one(operands):
    model = random_model()
    options = ProblemOptions(form=Form(operands=operands, answer_order="lsd_first"), digits=4)
    problems = [*eval_problems(1, 24), *eval_problems(4, 20, options=options)]
    assert any(p.blanks for p in problems) == (operands == "columns")
    budget = 5
    told = [greedy(model, problem, budget) for problem in problems]
    # Problems whose answers are what the model says: half of them, so that both outcomes occur.
    said = [
        p._replace(task="t", answer=TOKENIZER.decode(ids) if i % 2 else p.answer, traits=())
        for i, (p, ids) in enumerate(zip(problems, told, strict=True))
    ]
    expected = [ids == TOKENIZER.encode_answer(p.answer) for p, ids in zip(said, told, strict=True)]
    result = exact_match(model, TOKENIZER, said, batch_size=7, max_new_tokens=budget, max_misses=99)
    assert result.overall == sum(expected) / len(expected)
    assert result.truncated == sum(ids[-1] != TOKENIZER.eos_token_id for ids in told)
    assert [m.got for m in result.misses] == [
        TOKENIZER.decode(ids) for ids, right in zip(told, expected, strict=True) if not right
    ]
    assert 0 < len(result.misses) <= len(said)


def test_no_problems():
    with pytest.raises(ValueError, match="at least one problem"):
        exact_match(random_model(), TOKENIZER, [])
