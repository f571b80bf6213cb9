"""The files of a checkpoint folder: read without trust, replaced without a moment of neither.

A folder holds config.json and weights: model.safetensors, or shards and the
model.safetensors.index.json that lists them, or the pytorch_model.bin of official repositories.
Nothing here knows what the tensors mean.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import logging
import os
import pickle
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OFFICIAL = "pytorch_model.bin"
# Through one of these, weights are seen; where there are several, the first is.
ENTRIES = (SINGLE, INDEX, OFFICIAL)
SHARD = re.compile(r"model(\.\d+)?-\d{5}-of-\d{5}\.safetensors")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Put into names by DistributedDataParallel, torch.compile and FSDP.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}

STAGING = ".saving-"
STAGING_KEPT_S = 3600

# Shares that a checkpoint is loaded in: so much of it may be in memory twice.
PASSES = 24


def read_weights(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The weights of a folder by their official names, and the file they come from."""
    readers = (_read_safetensors, _read_shards, _read_official)
    for name, read in zip(ENTRIES, readers, strict=True):
        file = folder / name
        if file.is_file():
            return file, _plain_tensors(read(file), file)
    hint = ""
    if unfinished := sorted(folder.glob(f"{STAGING}*")):
        hint = f". A save into it was cut off; its files are in {unfinished[-1]}"
    raise FileNotFoundError(
        f"{folder} holds no weights: expected {SINGLE}, {INDEX} or {OFFICIAL}{hint}"
    )


def in_passes(
    read: Callable[[], tuple[Path, dict[str, torch.Tensor]]],
    taken: Callable[[str, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Take the tensors of a checkpoint out of its files with little memory besides.

    What has been read of a mapped file stays in memory until nothing refers to the mapping. So the
    files are mapped again for every share of the tensors, the largest first, when least is there.

    Args:
        read: maps the files, as `read_weights` does.
        taken: makes of a mapped tensor, given its name, one that is apart from the file.

    Raises:
        OSError: the files were replaced meanwhile.
    """
    source, tensors = read()
    version = _version(source)
    order = list(tensors)
    sizes = {name: tensors[name].nbytes for name in order}
    share = sum(sizes.values()) // PASSES
    waiting = sorted(order, key=sizes.get, reverse=True)
    found = {}
    while waiting:
        if tensors is None:
            _, tensors = read()
        left = share
        while waiting and (left == share or sizes[waiting[0]] <= left):
            name = waiting.pop(0)
            left -= sizes[name]
            found[name] = taken(name, tensors[name])
        tensors = None
        if _version(source) != version:
            raise OSError(f"{source} was replaced while it was read: load it again")
    return {name: found[name] for name in order}


def _version(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error


def read_index(index_file: Path) -> dict[str, set[str]]:
    """The names of the tensors that every shard holds, by the shard's file name."""
    index = read_json(index_file)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index_file} has no 'weight_map' from tensor names to file names")
    listed: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\:]+\.safetensors", shard):
            raise ValueError(
                f"{index_file}: {name!r} is in {shard!r}, expected the name of a .safetensors file "
                "in the same folder"
            )
        listed.setdefault(shard, set()).add(name)
    return listed


def _read_shards(index_file: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard, names in read_index(index_file).items():
        file = index_file.with_name(shard)
        if not file.is_file():
            raise FileNotFoundError(f"{index_file} lists {shard}, which is missing")
        held = _read_safetensors(file)
        if held.keys() != names:
            raise ValueError(
                f"{file} does not hold what {INDEX} lists: it lacks "
                f"{sorted(names - held.keys())} and adds {sorted(held.keys() - names)}"
            )
        tensors |= held
    return tensors


def _read_official(file: Path) -> Any:
    with open(file, "rb"):
        pass  # a file that cannot be opened says so itself; all that follows is about its content
    try:
        return torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except Exception as error:  # a broken or hostile pickle can provoke any, OSError included
        # Around its reason torch explains how to load the file unsafely: only the reason is kept.
        parts = [part.strip() for part in str(error).split("\n\n")]
        reason = parts[1] if isinstance(error, pickle.UnpicklingError) and parts[1:] else parts[0]
        raise ValueError(
            f"{file} is truncated, corrupt or holds more than tensors, and was not loaded: "
            f"{reason or type(error).__name__}"
        ) from None


def _plain_tensors(data: Any, file: Path) -> dict[str, torch.Tensor]:
    """Check that `data` is a flat mapping of names to tensors; take wrappers out of the names."""
    if not isinstance(data, dict):
        raise ValueError(f"{file} holds a {type(data).__name__}, expected names and tensors")
    tensors: dict[str, torch.Tensor] = {}
    for key, value in data.items():
        is_plain = (
            type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.layout is torch.strided
            and not value.is_meta
            and value.dtype in DTYPES
        )
        if not isinstance(key, str) or not is_plain:
            got = type(value).__name__
            if isinstance(value, torch.Tensor):
                got += f" ({value.layout}, {value.dtype}, {value.device})"
            raise ValueError(
                f"{file}: {key!r} is a {got}, expected names with plain tensors of "
                f"{', '.join(map(str, DTYPES))}"
            )
        name = without_wrappers(key)
        if name in tensors:
            raise ValueError(f"{file} holds {name!r} twice, under different prefixes")
        tensors[name] = value.detach()
    return tensors


def without_wrappers(name: str) -> str:
    """A tensor's name without what wrappers of modules put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def write_weights(
    tensors: dict[str, torch.Tensor],
    folder: Path,
    target: Path,
    *,
    max_shard_size: int | str,
    metadata: dict[str, str],
) -> None:
    """Write one file of weights, or shards and their index.

    Args:
        tensors: contiguous, and none a view into a larger one.
        folder: where to write.
        target: the folder that the files will move to; shards get names that none has there.
        max_shard_size: of one file, in bytes or as "5GB".
        metadata: of the safetensors headers.
    """
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=_unused_pattern(target), max_shard_size=max_shard_size
    )
    if not split.is_sharded:
        safetensors.torch.save_file(tensors, folder / SINGLE, metadata=metadata)
        return
    for shard, names in split.filename_to_tensors.items():
        part = {name: tensors[name] for name in names}
        safetensors.torch.save_file(part, folder / shard, metadata=metadata)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    write_json(folder / INDEX, index)


def _unused_pattern(path: Path) -> str:
    """A name for shards that no shard in the folder has, so that none is overwritten in use."""
    taken = [file.name for file in path.iterdir() if SHARD.fullmatch(file.name)]
    stems = itertools.chain(["model"], (f"model.{n}" for n in itertools.count(1)))
    stem = next(s for s in stems if not any(name.startswith(f"{s}-") for name in taken))
    return f"{stem}{{suffix}}.safetensors"


def replace_checkpoint(path: Path, write: Callable[[Path], None]) -> None:
    """Replace the checkpoint in a folder by another, whole or not at all.

    Args:
        path: the folder, made if needed; files of other names in it stay.
        write: writes the new checkpoint's files, CONFIG and one of ENTRIES among them, into the
            empty folder that it is given.

    Raises:
        OSError: writing failed, for instance on a full disk. What was in the folder is unchanged.
    """
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=path))
    try:
        write(staging)
        for file in staging.iterdir():
            _sync(file)
            # safetensors leaves its files readable by their owner alone.
            shutil.copymode(staging / CONFIG, file)
        shards = {file.name for file in staging.iterdir() if SHARD.fullmatch(file.name)}
        _install(staging, path, shards)
    except (OSError, SafetensorError) as error:
        failure = OSError(f"could not save to {path}: {error}. What was in the folder is unchanged")
        failure.errno = getattr(error, "errno", None)
        raise failure from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # not empty: the save went well
                path.rmdir()
    _remove_stale_shards(path, shards)


def _install(staging: Path, path: Path, shards: set[str]) -> None:
    """Move the staged files to their places; if that fails, put everything back.

    Weights are seen through one entry file, so the order is: shards, under names not in use; the
    other files; the entry. With the config unchanged, as in a training run, the
    replacement of the entry is the whole switch, and a crash at any moment leaves the old or the
    new checkpoint. If the config or the kind of entry changes, the old entry is taken away before:
    a crash then leaves no weights, which is an error, never weights under another's config.
    """
    entry = next(name for name in ENTRIES if (staging / name).exists())
    others = sorted({file.name for file in staging.iterdir()} - shards - {entry})
    others = [name for name in others if not _same(staging / name, path / name)]
    old_entries = [name for name in ENTRIES if (path / name).exists()]
    aside = old_entries if CONFIG in others or old_entries != [entry] else []

    kept = staging / "kept"
    kept.mkdir()
    for name in others:
        if (path / name).exists():
            shutil.copy2(path / name, kept / name)
    try:
        for name in sorted(shards):
            os.replace(staging / name, path / name)
        for name in aside:
            os.replace(path / name, kept / name)
        for name in [*others, entry]:
            os.replace(staging / name, path / name)
    except BaseException:
        if (staging / entry).exists():  # else the switch is made, and stays
            for name in [*shards, *others]:
                (path / name).unlink(missing_ok=True)
            for file in kept.iterdir():
                os.rename(file, path / file.name)
        raise
    with contextlib.suppress(OSError):  # not every system can sync a folder
        _sync(path)


def _remove_stale_shards(path: Path, shards: set[str]) -> None:
    """Remove the previous shards; the save is done by now, so a failure is only logged."""
    for file in path.iterdir():
        if SHARD.fullmatch(file.name) and file.name not in shards:
            try:
                file.unlink()
            except OSError as error:
                logger.warning("%s is no longer used but could not be removed: %s", file, error)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left, unless it is so young that its save may still run."""
    for folder in path.glob(f"{STAGING}*"):
        if time.time() - folder.stat().st_mtime > STAGING_KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def _sync(path: Path) -> None:
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(file: Path) -> Any:
    """Parse a JSON file; errors name it."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is missing: not a checkpoint folder") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def write_json(file: Path, data: Any) -> None:
    """Write a JSON file, indented."""
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
