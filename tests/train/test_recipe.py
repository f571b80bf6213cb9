import pytest
import torch
import yaml
from compare import assert_same

from mamba3 import Mamba3LM
from mamba3.optim import ANVIL, HybridOptimizer
from mamba3.train.config import OptimRecipe, Recipe, load_recipe
from mamba3.train.loop import learning_rate, make_optimizer

RECIPE = {
    "model": {"d_model": 16, "n_layer": 1, "d_state": 8, "headdim": 8},
    "data": {"stages": [2], "batch_size": 4},
    "optim": {"lr": 0.01},
    "train": {"steps": 3},
}


def write(tmp_path, content=RECIPE):
    path = tmp_path / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def changed(group, **values):
    return RECIPE | {group: RECIPE[group] | values}


def test_overrides(tmp_path):
    recipe = load_recipe(
        write(tmp_path),
        ["optim.lr=1e-3", "data.stages=[1, 2]", "train.seed=7", "model.is_mimo=true"],
    )
    assert recipe.optim.lr == 1e-3
    assert recipe.data.stages == [1, 2]
    assert recipe.data.batch_size == 4
    assert recipe.train.seed == 7
    assert recipe.architecture(32).is_mimo is True
    assert recipe.architecture(32).vocab_size == 32


def test_overrides_of_mamba_1_layers(tmp_path):
    changes = ["model.layers=[mamba, mamba3]", "model.mamba.d_state=4", "model.mamba.dt_min=1e-4"]
    changes += ["model.n_layer=2"]
    recipe = load_recipe(write(tmp_path), changes)
    config = recipe.architecture(32)
    assert config.kinds == ("mamba", "mamba3")
    assert (config.mamba.d_state, config.mamba.dt_min) == (4, 1e-4)
    whole = [*changes[::3], "model.mamba={d_state: 4, dt_min: 1e-4}"]
    assert load_recipe(write(tmp_path), whole) == recipe
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


def test_an_override_may_fill_a_group_that_is_not_there(tmp_path):
    content = {k: v for k, v in RECIPE.items() if k != "data"}
    assert load_recipe(write(tmp_path, content), ["data.batch_size=3"]).data.batch_size == 3


def test_yaml_round_trip(tmp_path):
    recipe = load_recipe(write(tmp_path, changed("optim", lr="1e-3", decay_steps=200)))
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", r"no key 'optim.lrr'; the nearest is 'optim.lr'"),
        ("lr=1", r"no key 'lr'; the nearest is 'optim.lr'"),
        ("training.steps=1", r"the nearest is 'train.steps'"),
        ("model.dmodel=1", r"the nearest is 'model.d_model'"),
        ("optim.lr", r"expected group.key=value, such as optim.lr=1e-3, got 'optim.lr'"),
        ("data.stages=[1", r"value of 'data.stages=\[1' is not valid YAML"),
        ("train.steps=many", r"steps must be int, got 'many'"),
        ("train.steps=0", r"steps must be at least 1, got 0"),
        ("optim.lr=.nan", r"lr must be float, got nan"),
        ("optim.grad_clip=0", r"grad_clip must be positive"),
        ("step.precision=fp8", r"precision must be one of float32, bf16, fp16, bf16-weights, got"),
        ("step.recompute=some", r"recompute must be one of none, full, selective, got 'some'"),
        ("step.accumulate=0", r"accumulate must be at least 1, got 0"),
        ("step.parallel=dp", r"parallel must be one of ddp, allreduce, fsdp, sharded, got 'dp'"),
        ("step.exchange=bf16", r"exchange=bf16 is for parallel allreduce, got ddp"),
        ("optim.name=muon", r"name must be one of adamw, hybrid, anvil, got 'muon'"),
        (
            "optim.preset=newton",
            r"preset must be one of keller5, polar_express5, anvil6, got 'newt",
        ),
        (
            "optim.preset=anvil6",
            r"'anvil6' is for hybrid and anvil, and the optimizer is adamw",
        ),
        ("optim.split=2", r"split must be bool, got 2"),
        ("optim.decay_steps=100", r"decay_steps must be more than warmup_steps, got 100 and 100"),
        ("data.stages=[7]", r"stages must be some of \[1, 2, 3, 4, 5, 6\]"),
        ("data.stages=2", r"stages must be a list, got 2"),
        ("data.batch_size=0", r"batch_size must be at least 1"),
        ("train.threads=0", r"threads must be at least 1"),
        ("model.headdim=5", r"headdim must divide"),
        ("model.mamba.d_sate=5", r"the nearest is 'model.mamba.d_state'"),
        ("mamba.d_conv=5", r"the nearest is 'model.mamba.d_conv'"),
        ("model.mamba.d_conv=3", r"the group 'mamba' is about Mamba-1 layers"),
    ],
)
def test_a_wrong_override_says_what_is_right(tmp_path, override, message):
    with pytest.raises((TypeError, ValueError), match=message):
        load_recipe(write(tmp_path), [override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", r"recipe\.yaml is not valid YAML"),
        ("- 1", r"recipe\.yaml must hold the groups model, data, optim and train"),
        ("", r"recipe\.yaml must hold the groups"),
        (RECIPE | {"optimizer": {}}, r"recipe has no key 'optimizer'; the nearest is 'optim'"),
        (RECIPE | {"optim": [1]}, r"recipe group 'optim' must be a mapping"),
        (RECIPE | {"model": 3}, r"recipe group 'model' must be a mapping"),
        (changed("optim", learning_rate=1), r"group 'optim' has no key 'learning_rate'"),
        (changed("model", d_modle=1), r"group 'model' has no key 'd_modle'.*'d_model'"),
        ({k: v for k, v in RECIPE.items() if k != "train"}, r"recipe lacks train"),
        ({k: v for k, v in RECIPE.items() if k != "model"}, r"neither .* nor train.init_from"),
        (RECIPE | {"train": {}}, r"recipe group 'train' lacks steps"),
    ],
)
def test_a_wrong_file_says_what_is_right(tmp_path, content, message):
    with pytest.raises((TypeError, ValueError), match=message):
        load_recipe(write(tmp_path, content))


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a recipe"):
        load_recipe(tmp_path / "none.yaml")


def test_a_recipe_can_be_built_in_python():
    assert Recipe.from_dict(RECIPE).train.steps == 3
    with pytest.raises(TypeError, match="recipe must be a mapping"):
        Recipe.from_dict([])


def test_learning_rate_by_hand():
    optim = OptimRecipe(lr=2.0, warmup_steps=4, decay_steps=12, min_lr_ratio=0.1)
    rates = [learning_rate(i, optim) for i in range(16)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[8] == pytest.approx((2.0 + 0.2) / 2)  # half way down the cosine
    assert rates[12:] == pytest.approx([0.2] * 4)
    assert rates[4:13] == sorted(rates[4:13], reverse=True)
    constant = OptimRecipe(lr=2.0, warmup_steps=0)
    assert [learning_rate(i, constant) for i in (0, 999)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"name": "hybrid"}, {}),
        ({"name": "hybrid", "preset": "anvil6"}, {"preset": "anvil6"}),
        ({"name": "hybrid", "split": False}, {"split": False}),
        ({"name": "anvil"}, ANVIL),
        ({"name": "anvil", "preset": "keller5", "split": False},
         ANVIL | {"preset": "keller5", "split": False}),
    ],
)  # fmt: skip
def test_the_optimizer_of_a_recipe_steps_as_its_keys_say(keys, options):
    config = Recipe.from_dict(RECIPE).architecture(32)
    optim = OptimRecipe(lr=0.01, momentum=0.8, **keys)
    numbers = {"lr": 0.01, "momentum": 0.8}

    def weights(make):
        torch.manual_seed(0)
        model = Mamba3LM(config)
        optimizer = make(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return model.state_dict()

    found = weights(lambda model: make_optimizer(model, optim))
    assert_same(found, weights(lambda model: HybridOptimizer(model, **numbers, **options)))
    plain = weights(lambda model: HybridOptimizer(model, **numbers))
    same = {torch.equal(found[name], plain[name]) for name in plain if "in_proj" in name}
    assert same == {not options}
