"""Bad files are refused by name and cannot do harm; a failed or cut-off save loses nothing."""

import errno
import json
import os
import pickle
import shutil
import time

import pytest
import safetensors.torch
import torch

from mamba3.checkpoint_files import ENTRIES, INDEX, OFFICIAL, SINGLE, STAGING, STAGING_KEPT_S
from mamba3.config import Mamba3Config
from mamba3.models.lm import Mamba3LM

SHARDED = 900  # bytes a shard: several for the model below


def tiny(seed, **changes):
    """A small model whose every parameter is random."""
    sizes = {"vocab_size": 20, "d_model": 8, "n_layer": 1, "d_state": 4, "headdim": 8}
    model = Mamba3LM(Mamba3Config(**(sizes | changes)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def matches(folder, model):
    loaded = Mamba3LM.from_pretrained(folder)
    ours, theirs = model.state_dict(), loaded.state_dict()
    return loaded.config == model.config and all(torch.equal(ours[n], theirs[n]) for n in ours)


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    tiny(0).save_pretrained(path)
    return path


@pytest.fixture
def sharded(tmp_path):
    path = tmp_path / "sharded"
    tiny(0).save_pretrained(path, max_shard_size=SHARDED)
    return path


@pytest.fixture
def official(folder):
    as_pickle(folder)
    return folder


def as_pickle(folder):
    torch.save(safetensors.torch.load_file(folder / SINGLE), folder / OFFICIAL)
    (folder / SINGLE).unlink()


def assert_refused(folder, file, message, error=ValueError):
    with pytest.raises(error, match=message) as caught:
        Mamba3LM.from_pretrained(folder)
    assert str(folder / file) in str(caught.value)
    return str(caught.value)


# Reading


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 0.5, -1])
def test_truncated_safetensors(folder, kept):
    data = (folder / SINGLE).read_bytes()
    kept = int(kept * len(data)) if isinstance(kept, float) else kept
    (folder / SINGLE).write_bytes(data[:kept])
    assert_refused(folder, SINGLE, "truncated or not a safetensors file")


@pytest.mark.parametrize("kept", [0, 30, 0.5, 0.9, -1])
def test_truncated_pickle(official, kept):
    data = (official / OFFICIAL).read_bytes()
    kept = int(kept * len(data)) if isinstance(kept, float) else kept
    (official / OFFICIAL).write_bytes(data[:kept])
    assert_refused(official, OFFICIAL, "is truncated, corrupt or holds more than tensors")


@pytest.mark.parametrize("name", [SINGLE, OFFICIAL])
def test_garbage(folder, name):
    (folder / SINGLE).unlink()
    for garbage in (b"\xff" * 500, b"PK\x03\x04" + b"\0" * 200, b"<html>not found</html>"):
        (folder / name).write_bytes(garbage)
        assert_refused(folder, name, "truncated")


class Canary:
    """Makes a file when unpickled without care."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_code_in_a_pickle_is_not_run(official, tmp_path, form):
    canary, file = tmp_path / "canary", official / OFFICIAL
    data = torch.load(file, weights_only=True) | {"extra": Canary(canary)}
    if form == "pickle":
        file.write_bytes(pickle.dumps(data["extra"], protocol=2))
    else:
        torch.save(data, file, _use_new_zipfile_serialization=form == "zip")
    message = assert_refused(official, OFFICIAL, "was not loaded")
    assert not canary.exists()
    assert "weights_only" not in message  # no advice to switch the protection off

    if form == "pickle":
        pickle.loads(file.read_bytes())
    else:
        torch.load(file, weights_only=False)
    assert canary.exists()  # it would have run


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([torch.zeros(2)], "holds a list, expected names and tensors"),
        (torch.zeros(2), "holds a Tensor, expected names and tensors"),
        ({"model": {"a": torch.zeros(2)}}, "'model' is a dict, expected names with plain tensors"),
        ({"step": 3}, "'step' is a int, expected names"),
        ({0: torch.zeros(2)}, "0 is a Tensor .*float32.* expected names"),
        (
            {"a": torch.zeros(2, dtype=torch.int64)},
            "'a' is a Tensor .*torch.int64, cpu.*, expected",
        ),
        ({"a": torch.zeros(2, device="meta")}, "'a' is a Tensor .*meta.*, expected"),
        ({"a": torch.zeros(2).to_sparse()}, "'a' is a Tensor .*torch.sparse_coo.*, expected"),
        ({"module.a": torch.zeros(2), "a": torch.zeros(2)}, "holds 'a' twice"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of older torch
def test_pickles_of_other_things(official, data, message):
    torch.save(data, official / OFFICIAL)
    assert_refused(official, OFFICIAL, message)


def test_a_huge_tensor_without_data_costs_nothing(official):
    file = official / OFFICIAL
    data = torch.load(file, weights_only=True)
    data["backbone.norm_f.weight"] = torch.zeros(1).expand(1 << 40)
    torch.save(data, file)
    assert_refused(official, OFFICIAL, rf"wrong shape: backbone.norm_f.weight is \[{1 << 40}\]")


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", 3]
)
def test_index_that_points_elsewhere(sharded, folder, shard):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["backbone.norm_f.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    shutil.copy(folder / SINGLE, sharded.parent / SINGLE)  # what the first of them would read
    assert_refused(sharded, INDEX, "expected the name of a .safetensors file in the same folder")


def test_index_that_does_not_fit_its_shards(sharded):
    first, second = sorted(sharded.glob("model-*"))[:2]
    first_data = first.read_bytes()
    shutil.copy(second, first)
    assert_refused(sharded, first.name, "does not hold what model.safetensors.index.json lists")
    first.write_bytes(first_data[:-1])
    assert_refused(sharded, first.name, "truncated or not a safetensors file")
    first.unlink()
    assert_refused(sharded, INDEX, f"lists {first.name}, which is missing", FileNotFoundError)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": []}', "{}"])
def test_bad_index(sharded, text):
    (sharded / INDEX).write_text(text)
    assert_refused(sharded, INDEX, "is not valid JSON|has no 'weight_map'")


def test_no_weights(folder):
    (folder / SINGLE).unlink()
    message = f"{folder} holds no weights: expected {SINGLE}, {INDEX} or {OFFICIAL}$"
    with pytest.raises(FileNotFoundError, match=message):
        Mamba3LM.from_pretrained(folder)


# Replacing: what was there, what is saved over it


class Tokenizer:
    """Stands for any tokenizer: a file that changes between saves."""

    def __init__(self, text):
        self.text = text

    def save(self, folder):
        (folder / "tokenizer.json").write_text(self.text)


OTHER = {"a_activation": "softplus"}  # as dangerous as it gets: the same shapes, another model
CHANGES = {
    "one file": ({}, {}, {}),
    "to shards": ({}, {"max_shard_size": SHARDED}, {}),
    "from shards": ({"max_shard_size": SHARDED}, {}, {}),
    "from a pickle": ({}, {}, {}),
    "from a pickle, to shards": ({}, {"max_shard_size": SHARDED}, OTHER),
    "shards": ({"max_shard_size": SHARDED}, {"max_shard_size": SHARDED}, {}),
    "other model": ({}, {}, OTHER),
    "other model, shards": ({"max_shard_size": SHARDED}, {"max_shard_size": SHARDED}, OTHER),
    "other model, from shards": ({"max_shard_size": SHARDED}, {}, OTHER),
}


@pytest.fixture(params=CHANGES)
def change(request, tmp_path):
    """A folder with a checkpoint, that model, the next one, and the call that saves it there."""
    before, after, config = CHANGES[request.param]
    folder, old, new = tmp_path / "run", tiny(1), tiny(2, **config)
    old.save_pretrained(folder, tokenizer=Tokenizer("old"), **before)
    if "pickle" in request.param:
        as_pickle(folder)
    (folder / "README.md").write_text("mine")

    def save():
        new.save_pretrained(folder, tokenizer=Tokenizer("new"), **after)

    return folder, old, new, save


def assert_only_the_new(folder, new):
    assert matches(folder, new)
    assert (folder / "tokenizer.json").read_text() == "new"
    assert (folder / "README.md").read_text() == "mine"
    used = {"README.md", "config.json", "tokenizer.json"}
    if (folder / INDEX).exists():
        used |= {INDEX, *json.loads((folder / INDEX).read_text())["weight_map"].values()}
    else:
        used |= {SINGLE}
    assert {file.name for file in folder.iterdir()} == used


def test_save_over_a_checkpoint(change):
    folder, _, new, save = change
    save()
    assert_only_the_new(folder, new)
    save()
    assert_only_the_new(folder, new)


def test_full_disk_while_writing_weights(change, monkeypatch):
    folder, old, new, save = change
    before = contents(folder)

    def half(tensors, file, metadata=None):
        file.write_bytes(safetensors.torch.save(tensors, metadata)[:200])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(OSError, match=r"No space left on device\. What was .* unchanged") as caught:
        save()
    assert caught.value.errno == errno.ENOSPC
    assert contents(folder) == before
    assert matches(folder, old)
    monkeypatch.undo()
    save()
    assert_only_the_new(folder, new)


def test_real_file_size_limit(change):
    import resource

    folder, old, _, save = change
    before = contents(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        with pytest.raises(OSError, match=f"could not save to {folder}"):
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(folder) == before
    assert matches(folder, old)


def test_tokenizer_that_fails(folder):
    class Failing(Tokenizer):
        def save(self, folder):
            super().save(folder)
            raise RuntimeError("no tokenizer")

    before = contents(folder)
    with pytest.raises(RuntimeError, match="no tokenizer"):
        tiny(1).save_pretrained(folder, tokenizer=Failing(""))
    assert contents(folder) == before


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("moved", [False, True])
def test_failure_at_any_move(change, monkeypatch, error, moved):
    """Also an interrupt that strikes after the move was made (`moved`)."""
    folder, old, new, save = change
    before, real = contents(folder), os.replace
    for allowed in range(100):
        calls = 0

        def replace(source, target, allowed=allowed):
            nonlocal calls
            calls += 1
            if calls <= allowed:
                real(source, target)
            elif calls == allowed + 1:
                if moved:
                    real(source, target)
                raise error

        monkeypatch.setattr(os, "replace", replace)
        try:
            save()
        except (OSError, KeyboardInterrupt):
            if contents(folder) == before:
                assert matches(folder, old)
            else:  # the move of the entry was the last one, and it was made
                assert moved
                assert matches(folder, new)
                before = None
        else:
            break
        finally:
            monkeypatch.undo()
        if before is None:
            break
    assert allowed >= 1
    save()
    assert_only_the_new(folder, new)


class Killed(BaseException):
    """The process is gone: nothing it would still do is done."""


def test_kill_at_any_move(change, monkeypatch):
    """A crash leaves the old or the new checkpoint; for another model or form, perhaps none."""
    folder, old, new, save = change
    original, outcomes = contents(folder), []
    for allowed in range(100):
        shutil.rmtree(folder)
        folder.mkdir()
        for name, data in original.items():
            (folder / name).write_bytes(data)
        moves, dead = 0, False

        def wrap(real, counts=False, allowed=allowed):
            def call(*args, **options):
                nonlocal moves, dead
                moves += counts
                dead = dead or moves > allowed
                if dead:
                    raise Killed
                return real(*args, **options)

            return call

        monkeypatch.setattr(os, "replace", wrap(os.replace, counts=True))
        for module, name in ((os, "rename"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
            monkeypatch.setattr(module, name, wrap(getattr(module, name)))
        try:
            save()
        except Killed:
            pass
        else:
            break
        finally:
            monkeypatch.undo()
        if any((folder / name).exists() for name in ENTRIES):
            outcomes.append("old" if matches(folder, old) else "new")
            assert outcomes[-1] == "old" or matches(folder, new)
        else:
            outcomes.append("none")
            with pytest.raises(FileNotFoundError, match=f"cut off; its files are in .*/{STAGING}"):
                Mamba3LM.from_pretrained(folder)
        save()
        assert matches(folder, new)
    assert outcomes
    assert outcomes[0] == "old"
    same_model = old.config == new.config
    same_form = any(name in original and (folder / name).exists() for name in ENTRIES)
    assert ("none" in outcomes) == (not (same_model and same_form))


def test_failed_save_leaves_no_new_folder(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        tiny(0).save_pretrained(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_bad_shard_size(folder):
    before = contents(folder)
    with pytest.raises(ValueError, match="a lot"):
        tiny(1).save_pretrained(folder, max_shard_size="a lot")
    assert contents(folder) == before


def test_leftovers_of_killed_saves_are_removed_once_old(folder):
    for name, age in (("young", STAGING_KEPT_S - 60), ("old", STAGING_KEPT_S + 60)):
        left = folder / f"{STAGING}{name}"
        left.mkdir()
        (left / SINGLE).write_bytes(b"")
        os.utime(left, (time.time() - age,) * 2)
    tiny(1).save_pretrained(folder)
    assert (folder / f"{STAGING}young").exists()
    assert not (folder / f"{STAGING}old").exists()


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_are_as_readable_as_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        tiny(0).save_pretrained(tmp_path, max_shard_size=SHARDED)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o666 & ~umask}


def test_links_of_a_download_cache_are_replaced_not_followed(folder, tmp_path):
    blob = tmp_path / "blob"
    os.rename(folder / SINGLE, blob)
    (folder / SINGLE).symlink_to(blob)
    before = blob.read_bytes()
    tiny(1).save_pretrained(folder)
    assert blob.read_bytes() == before
    assert matches(folder, tiny(1))
