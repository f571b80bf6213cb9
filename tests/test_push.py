"""Uploads and downloads against a stub of the Hub: what goes, what comes, and every refusal."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch
from hub_stub import TOKEN, Fault, HubStub, environment, in_place_of_the_hub, serving
from huggingface_hub import constants

from mamba3 import load_model, load_tokenizer, push, zoo
from mamba3.cli import main
from mamba3.config import Mamba3Config
from mamba3.convert import convert
from mamba3.data.tokenizer import CharTokenizer
from mamba3.models.lm import Mamba3LM
from mamba3.push import files_to_push, push_to_hub

# huggingface_hub's own, of the HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TOKENIZER = CharTokenizer("0123456789+=")
IDS = torch.tensor([[1, 5, 3, 9, 2, 14]])
CARD = "---\nlicense: mit\n---\n# mine\n"
MODEL_FILES = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
MODEL_FILES += ["tokenizer.json", "tokenizer_config.json"]


def tiny(seed=0):
    torch.manual_seed(seed)
    sizes = {"vocab_size": TOKENIZER.vocab_size, "d_model": 16, "n_layer": 2, "d_state": 8}
    return Mamba3LM(Mamba3Config(**sizes, headdim=8)).eval()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with in_place_of_the_hub(tmp_path, monkeypatch) as stub:
        yield stub


@pytest.fixture
def folder(tmp_path):
    """A model as a run leaves it, with more beside it than the model."""
    folder = tmp_path / "run"
    tiny().save_pretrained(folder, tokenizer=TOKENIZER)
    (folder / "README.md").write_text(CARD)
    (folder / "checkpoints" / "step-5").mkdir(parents=True)
    for name in ("metrics.jsonl", "recipe.yaml", "optimizer.safetensors", "checkpoints/x.json"):
        (folder / name).write_text("{}")
    (folder / "checkpoints/step-5/model.safetensors").write_text("state")
    return folder


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(push, "WAITS_S", (0.0, 0.0))


def assert_same_logits(model, other):
    assert model.config == other.config
    assert torch.equal(model(IDS).logits, other(IDS).logits)


# What goes, and comes back


def test_a_folder_there_and_back(hub, folder):
    assert push_to_hub(folder, "me/x", token=TOKEN, message="the first") == f"{hub.url}/me/x"
    repository = hub.repositories["me/x"]
    assert sorted(repository.files()) == MODEL_FILES
    assert repository.messages == ["the first"]
    assert not repository.private
    for name, file in repository.files().items():
        assert file.data == (folder / name).read_bytes()
    for back in (Mamba3LM.from_pretrained("me/x"), load_model("hf-hub:me/x")):
        assert_same_logits(back, tiny())
    assert load_tokenizer("me/x").characters == TOKENIZER.characters


def test_a_model_in_shards_with_its_tokenizer(hub):
    model = tiny()
    options = {"tokenizer": TOKENIZER, "max_shard_size": 4000, "private": True}
    model.push_to_hub("me/x", token=TOKEN, **options)
    repository = hub.repositories["me/x"]
    assert repository.private
    assert len(repository.messages) == 1
    assert sum(name.startswith("model-0") for name in repository.files()) > 2
    assert_same_logits(Mamba3LM.from_pretrained("me/x", token=TOKEN), model)
    with pytest.raises(FileNotFoundError, match=r"no folder here, and there is no me/y .*private"):
        zoo.resolve("me/y")


def test_a_private_model_needs_the_token(hub):
    tiny().push_to_hub("me/x", token=TOKEN, private=True)
    with pytest.raises(FileNotFoundError, match=r"no me/x on http.*private.*`hf auth login`"):
        Mamba3LM.from_pretrained("me/x")
    assert_same_logits(Mamba3LM.from_pretrained("me/x", token=TOKEN), tiny())


def test_only_what_changed_is_sent_again(hub, folder):
    push_to_hub(folder, "me/x", token=TOKEN)
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    push_to_hub(folder, "me/x", token=TOKEN, message="settings")
    assert hub.repositories["me/x"].text("generation_config.json") == '{"temperature": 0.7}'
    assert hub.count("PUT", "/objects/") == 1
    assert len(hub.repositories["me/x"].messages) == 2


def test_a_card_on_the_hub_is_kept(hub, folder):
    repository = hub.create("me/x", {"README.md": "theirs", "notes.txt": "kept"})
    push_to_hub(folder, "me/x", token=TOKEN)
    assert repository.text("README.md") == "theirs"
    assert repository.text("notes.txt") == "kept"
    push_to_hub(folder, "me/x", token=TOKEN, replace_card=True)
    assert repository.text("README.md") == CARD


def test_branches_and_revisions(hub, folder):
    push_to_hub(folder, "me/x", token=TOKEN)
    other = tiny(1)
    url = push_to_hub(other, "me/x", token=TOKEN, branch="long")
    assert url == f"{hub.url}/me/x/tree/long"
    commit = hub.repositories["me/x"].branches["long"]
    for name in ("me/x@long", "hf-hub:me/x@long", f"me/x@{commit}"):
        assert_same_logits(load_model(name), other)
    assert_same_logits(Mamba3LM.from_pretrained("me/x", revision="long"), other)
    assert_same_logits(load_model("me/x"), tiny())
    with pytest.raises(FileNotFoundError, match=r"me/x has no revision 'no': see .*commits/main"):
        load_model("me/x@no")
    with pytest.raises(ValueError, match="names a revision, and revision='main' another"):
        load_model("me/x@long", revision="main")
    with pytest.raises(ValueError, match="it has no revision 'main'"):
        load_model(folder, revision="main")
    push_to_hub(tiny(2), "me/x", token=TOKEN, branch="long")  # the branch is there already
    assert_same_logits(load_model("me/x@long"), tiny(2))


def test_a_pull_request_to_another(hub, folder):
    repository = hub.create("org/x", {"README.md": "theirs"})
    url = push_to_hub(folder, "org/x", token=TOKEN, create_pr=True)
    assert url == f"{hub.url}/org/x/discussions/1"
    assert sorted(repository.files()) == ["README.md"]
    assert_same_logits(load_model("org/x@refs/pr/1"), tiny())
    with pytest.raises(ValueError, match="against the main branch: leave out branch='b'"):
        push_to_hub(folder, "org/x", token=TOKEN, create_pr=True, branch="b")


# Refusals


@pytest.mark.parametrize(
    ("repo_id", "token", "fault", "error", "message"),
    [
        ("me/x", "hf_bad", None, PermissionError, r"no such token.*me/x: log in with `hf auth"),
        ("org/x", TOKEN, None, PermissionError, r"may not do that with org/x \(not a repository"),
        ("me/x", TOKEN, ("POST", "/commit/", 409), FileExistsError, r"same time.*try again"),
        ("me/x", TOKEN, ("POST", "/preupload/", 404, "RepoNotFound"), FileNotFoundError, "no me/x"),
        ("me/x", TOKEN, ("PUT", "/objects/", 403), PermissionError, "may not do that with me/x"),
        ("me/x", TOKEN, ("POST", "/commit/", 500), OSError, "status 500 .*try later"),
        ("a b", TOKEN, None, ValueError, "a b"),
    ],
)
def test_refused_uploads_say_what_to_do(
    hub, folder, no_waiting, repo_id, token, fault, error, message
):
    if fault:
        method, part, status, *code = fault
        hub.faults.append(Fault(method, part, status, times=9, code=code[0] if code else None))
    with pytest.raises(error, match=message):
        push_to_hub(folder, repo_id, token=token)
    assert not any(repository.messages for repository in hub.repositories.values())


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT", "/objects/", None),
        Fault("POST", "/preupload/", None),
        Fault("POST", "/commit/", None),
        Fault("POST", "/commit/", 503),
        Fault("POST", "/commit/", 503, times=2),
        Fault("POST", "/commit/", None, after=True),
    ],
    ids=lambda fault: f"{fault.part.strip('/')}-{fault.status}-{fault.times}-{fault.after}",
)
def test_an_upload_that_breaks_off_is_tried_again(hub, folder, no_waiting, fault):
    fault = Fault(**vars(fault))
    hub.faults.append(fault)
    push_to_hub(folder, "me/x", token=TOKEN)
    assert fault.times == 0
    assert len(hub.repositories["me/x"].messages) == 1
    assert_same_logits(load_model("me/x"), tiny())


def test_a_pull_request_is_not_made_twice(hub, folder, no_waiting):
    hub.create("org/x", {})
    hub.faults.append(Fault("POST", "/commit/", None, after=True))
    with pytest.raises(ConnectionError, match=r"org/x: http.* cannot be reached"):
        push_to_hub(folder, "org/x", token=TOKEN, create_pr=True)
    assert hub.count("POST", "/commit/") == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda f: (f / "config.json").unlink(), FileNotFoundError, "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{}"), TypeError, "config.json: "),
        (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "holds no weights"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            ValueError,
            "as a pickle.*write them as safetensors first",
        ),
        (
            lambda f: (
                tiny(3).save_pretrained(f, max_shard_size=4000),
                next(f.glob("model-*")).unlink(),
            ),
            FileNotFoundError,
            r"index.json lists model-0.*missing there",
        ),
    ],
)
def test_folders_that_are_no_model_are_not_pushed(hub, folder, change, error, message):
    change(folder)
    with pytest.raises(error, match=message):
        push_to_hub(folder, "me/x", token=TOKEN)
    assert hub.requests == []


# Downloads


def test_safetensors_are_taken_before_the_pickle(hub, folder):
    torch.save({"not": "the model"}, folder / "pytorch_model.bin")
    files = {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}
    hub.create("org/both", files)
    assert_same_logits(load_model("org/both"), tiny())
    found = {path.name for path in zoo.resolve("org/both").iterdir()}
    assert found == set(MODEL_FILES)


def test_official_repositories(hub, tmp_path):
    """A pickle, and a config that leaves a_activation open: known of a model with a name."""
    source = tmp_path / "source"
    model = tiny()
    model.save_pretrained(source)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    ssm = {"layer": "Mamba3", "d_state": 8, "headdim": 8}
    config = {"d_model": 16, "n_layer": 2, "vocab_size": TOKENIZER.vocab_size, "ssm_cfg": ssm}
    files = {"config.json": json.dumps({**config, "pad_vocab_size_multiple": 16})}
    files["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    named = zoo.MODELS["mamba3-siso-187m"]
    hub.create(named.repo_id, files, named.revision)
    assert_same_logits(load_model(named.name), model)
    assert hub.count("GET", "/api/models/state-spaces/mamba3-siso-187m/revision") == 0
    with pytest.warns(UserWarning, match="a_activation"):
        load_model(f"{named.repo_id}@{named.revision}")


def test_mamba_1_repositories(hub, tmp_path):
    """The official one with its pickle, and that in the form of transformers."""
    sizes = {"vocab_size": TOKENIZER.vocab_size, "d_model": 16, "n_layer": 2}
    model = Mamba3LM(Mamba3Config(**sizes, layers="mamba", pad_vocab_size_multiple=1)).eval()
    model.save_pretrained(tmp_path / "ours")
    for name, form in (("mamba-130m", "mamba_ssm"), ("mamba-130m-hf", "transformers")):
        convert(tmp_path / "ours", tmp_path / form, to=form)
        files = {f.name: f.read_bytes() for f in (tmp_path / form).iterdir()}
        hub.create(f"state-spaces/{name}", files)
        assert_same_logits(load_model(name), model)


def test_weights_of_other_models_are_not_downloaded(hub):
    files = {"config.json": '{"model_type": "llama"}', "tokenizer.json": "{}"}
    hub.create("org/llama", {**files, "model.safetensors": b"16 GB", "notes/a.txt": ""})
    assert {path.name for path in zoo.resolve("org/llama").iterdir()} == set(files)
    with pytest.raises(ValueError, match="model_type 'llama', expected 'mamba3'"):
        load_model("org/llama")


def test_offline_the_cache_is_enough(hub, folder, monkeypatch):
    push_to_hub(folder, "me/x", token=TOKEN)
    load_model("me/x")
    asked = len(hub.requests)
    assert_same_logits(load_model("me/x", local_files_only=True), tiny())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_same_logits(load_model("me/x"), tiny())
    with pytest.raises(FileNotFoundError, match=r"HF_HUB_OFFLINE is set.*unset it"):
        load_model("me/y")
    assert len(hub.requests) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(FileNotFoundError, match="me/y, revision main, is not wholly in the cache"):
        load_model("me/y", local_files_only=True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    assert_same_logits(load_model("me/x"), tiny())
    with pytest.raises(FileNotFoundError, match=r"in the cache, and http.*: check the network"):
        load_model("me/y")


@pytest.mark.parametrize(
    ("status", "code", "error", "message"),
    [
        (403, "GatedRepo", PermissionError, "org/x is gated: accept its conditions on http"),
        (403, None, PermissionError, "may not do that with org/x"),
        (404, "RepoNotFound", FileNotFoundError, "is no folder here, and there is no org/x"),
        (500, None, OSError, "status 500"),
        (None, None, ConnectionError, "org/x: http.* cannot be reached"),
    ],
)
def test_refused_downloads_say_what_to_do(hub, folder, status, code, error, message):
    hub.create("org/x", {})
    hub.faults.append(Fault("GET", "/api/models/org/x", status, times=9, code=code))
    with pytest.raises(error, match=message):
        load_model("org/x")


def test_a_name_that_is_also_a_folder(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny(1).save_pretrained("me/x")
    tiny(2).push_to_hub("me/x", token=TOKEN)
    with pytest.raises(ValueError, match=r"'./me/x' for the folder, or 'hf-hub:me/x' for the mo"):
        load_model("me/x")
    for name in ("./me/x", "local-dir:me/x", tmp_path / "me" / "x"):
        assert_same_logits(load_model(name), tiny(1))
    assert_same_logits(load_model("hf-hub:me/x"), tiny(2))
    tiny(1).save_pretrained("mamba3-siso-187m")
    with pytest.raises(ValueError, match=r"'./mamba3-siso-187m' .* 'hf-hub:state-spaces/mamba3-s"):
        load_model("mamba3-siso-187m")
    with pytest.raises(ValueError, match="expected hf-hub:org/name@revision"):
        load_model("hf-hub:gpt2")


# The command


def test_dry_run_shows_what_would_go_and_asks_nobody(hub, folder, capsys):
    assert main(["push", str(folder), "me/x", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*MODEL_FILES, "to"]
    assert files_to_push(folder) == MODEL_FILES
    assert hub.requests == []


def test_code_that_the_config_names_goes_along(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_mamba3.Config", "AutoModel": "gone.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_mamba3.py", "setup.py"):
        (folder / name).write_text("")
    assert files_to_push(folder) == sorted([*MODEL_FILES, "configuration_mamba3.py"])


def test_the_command_passes_its_options(hub, folder, capsys):
    options = ["--private", "--branch", "b", "--message", "mine", "--token", TOKEN]
    assert main(["push", str(folder), "me/x", *options]) == 0
    assert capsys.readouterr().out == f"{hub.url}/me/x/tree/b\n"
    repository = hub.repositories["me/x"]
    assert repository.private
    assert repository.messages == ["mine"]
    assert repository.files("main") == {}
    assert main(["push", str(folder), "me/x", "--token", "hf_bad"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("mamba3: error: ")


def test_push_generate_and_offline_in_new_processes(folder, tmp_path):
    def run(*arguments, **more):
        return subprocess.run(
            [sys.executable, "-m", "mamba3", *arguments],
            env={**os.environ, **environment(stub, tmp_path / "home", **more)},
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    with serving(HubStub()) as stub:
        done = run("push", str(folder), "me/x")
        assert (done.returncode, done.stdout) == (0, f"{stub.url}/me/x\n"), done.stderr
        generate = ("generate", "--model", "me/x", "12+", "7", "--max-new-tokens", "5")
        online = run(*generate)
    offline = run(*generate, HF_HUB_OFFLINE="1")
    local = run(*generate[:2], str(folder), *generate[3:])
    assert online.returncode == 0, online.stderr
    assert online.stdout == offline.stdout == local.stdout != ""


def test_what_was_pushed_comes_from_a_mirror_server(hub, folder, tmp_path, monkeypatch):
    """olah serves a git folder of the pushed files, offline, on this machine."""
    pytest.importorskip("olah")
    push_to_hub(folder, "me/x", token=TOKEN)
    mirrored = tmp_path / "mirrors" / "models" / "me" / "x"
    mirrored.mkdir(parents=True)
    for name, file in hub.repositories["me/x"].files().items():
        (mirrored / name).write_bytes(file.data)
    author = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", *author, *command], cwd=mirrored, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "olah.toml").write_text(
        f'[basic]\nhost = "127.0.0.1"\nport = {port}\nrepos-path = "{tmp_path / "repos"}"\n'
        f'mirrors-path = ["{tmp_path / "mirrors"}"]\n[accessibility]\noffline = true\n'
    )
    command = [sys.executable, "-c", "from olah.server import cli; cli()", "-c", "olah.toml"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-path", str(tmp_path / "logs")]
    with open(tmp_path / "olah.log", "wb") as log:
        server = subprocess.Popen([*command, *options], cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_for(port, server)
        url = f"http://127.0.0.1:{port}"
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        assert_same_logits(load_model("me/x"), tiny())
        assert load_tokenizer(zoo.resolve("me/x")).characters == TOKENIZER.characters
    finally:
        server.terminate()
        server.wait(20)


def wait_for(port, server):
    """Until a server answers; one that has ended fails the test."""
    for _ in range(200):
        assert server.poll() is None
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError


@pytest.mark.network
def test_the_network():
    """The real Hub answers; skipped where there is no network."""
    try:
        socket.create_connection(("huggingface.co", 443), timeout=5).close()
    except OSError:
        pytest.skip("no network")
    named = zoo.MODELS["mamba3-siso-187m"]
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(named.repo_id, revision=named.revision)
    assert {"config.json", "pytorch_model.bin"} <= set(files)
