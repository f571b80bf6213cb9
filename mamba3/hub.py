"""Load models from checkpoint folders, our own and other packages', and save them.

Tensor names are the official ones, but for one that other packages have. A model is built without
memory (meta device) and takes its tensors only after every one of them has been checked, so a bad
file never leaves half a model. Loading takes no more memory than the model and a small share of it.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .checkpoint_files import (
    CONFIG,
    DTYPES,
    GENERATION,
    in_passes,
    read_json,
    read_weights,
    replace_checkpoint,
    without_wrappers,
    write_json,
    write_weights,
)
from .config import Mamba3Config
from .models.lm import Mamba3LM
from .zoo import MODELS, resolve

if TYPE_CHECKING:
    from .data.tokenizer import Tokenizer

EMBEDDING = "backbone.embedding.weight"
OTHER_EMBEDDING = "backbone.embeddings.weight"  # as fla and transformers call it
HEAD = "lm_head.weight"


def load_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    a_activation: str | None = None,
) -> Mamba3LM:
    """Load a model in evaluation mode, by its name, from a local folder or from the Hub.

    Args:
        name_or_path: a name of `mamba3.list_models()`, a folder in any form of `mamba3.forms`, or
            a model on the Hub; see `mamba3.zoo.resolve`.
        revision, token, local_files_only: for a model on the Hub, see `mamba3.zoo.resolve`.
        dtype: of the weights: float32, bfloat16, float16 or float64; None keeps the stored one.
            The parameters of `model.float32_parameter_names()` are never narrower than float32.
        device: where the weights go; None is the CPU.
        a_activation: overrides that of config.json; see `Mamba3Config`. Official files leave it
            open, and without it give a warning; of the models with a name it is known.

    Returns:
        The model, with `lm_head.weight` tied to the embedding if the config says so.

    Raises:
        OSError: a file or folder is missing, cannot be read, or was replaced meanwhile; the Hub
            refuses it or cannot be reached.
        ValueError, TypeError: a file is truncated, corrupt, holds more than tensors, or does not
            fit; the message names the file and every missing, unexpected and mis-shaped tensor.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    folder = resolve(
        name_or_path, revision=revision, token=token, local_files_only=local_files_only
    )
    named = MODELS.get(str(name_or_path))
    if a_activation is None and named is not None and not named.is_shipped:
        a_activation = named.config().a_activation
    config = read_config(folder, a_activation=a_activation)
    model = Mamba3LM(config, device="meta")

    def read() -> tuple[Path, dict[str, torch.Tensor]]:
        source, tensors = read_weights(folder)
        if EMBEDDING not in tensors and OTHER_EMBEDDING in tensors:
            tensors[EMBEDDING] = tensors.pop(OTHER_EMBEDDING)
        _check_fit(model, tensors, f"{source} does not fit {CONFIG}")
        return source, tensors

    wide = model.float32_parameter_names()

    def taken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        target = dtype or tensor.dtype
        if name in wide:
            target = torch.promote_types(target, torch.float32)
        # Copied even where nothing changes: the tensor may be a view of the mapped file, and what
        # happens to the file later must not reach the model.
        return tensor.to(device=device or "cpu", dtype=target, copy=True)

    return filled(model, in_passes(read, taken))


def filled(model: Mamba3LM, tensors: dict[str, torch.Tensor]) -> Mamba3LM:
    """A model with these tensors themselves for its parameters, in evaluation mode.

    Args:
        model: on the meta device.
        tensors: by name; where the head is tied, the embedding's is taken for both.
    """
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    if model.config.tie_embeddings:
        parameters[HEAD] = parameters[EMBEDDING]
    model.load_state_dict(parameters, assign=True)
    return model.eval()


def save_pretrained(
    model: Mamba3LM,
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_size: int | str = "5GB",
    metadata: dict[str, str] | None = None,
) -> None:
    """Save a model as config.json and safetensors, whole or not at all.

    In a run of several processes, call it on one of them.

    Args:
        model: the model; wrappers' prefixes in its parameter names are left out.
        path: folder, made if needed. A checkpoint in it is replaced, other files stay.
        tokenizer: saved beside the weights, by its `save(folder)`.
        max_shard_size: of one weights file, in bytes or as "5GB"; larger models are sharded.
        metadata: further entries of the safetensors header, strings to strings.

    Raises:
        NotADirectoryError: `path` is a file.
        OSError: writing failed, for instance on a full disk. What was in the folder is unchanged.
        ValueError, TypeError: the model's tensors are not those of its config, or cannot be saved.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"'{path}' is a file, expected a folder to save into")
    header = {"format": "pt", **(metadata or {})}
    for item in itertools.chain.from_iterable(header.items()):
        if not isinstance(item, str):
            raise TypeError(f"metadata must map strings to strings, got {item!r} in {metadata}")
    tensors = tensors_to_save(model)

    def write(folder: Path) -> None:
        write_json(folder / CONFIG, model.config.to_dict())
        if tokenizer is not None:
            tokenizer.save(folder)
            if ends := _special_ids(tokenizer):
                write_json(folder / GENERATION, ends)
        write_weights(tensors, folder, path, max_shard_size=max_shard_size, metadata=header)

    replace_checkpoint(path, write)


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """What transformers has to know to start, to end and to pad, as generation_config.json."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name, None) for name in names}
    return {name: i for name, i in ids.items() if i is not None}


def read_config(folder: str | os.PathLike[str], *, a_activation: str | None = None) -> Mamba3Config:
    """Read the config.json of a checkpoint folder; see `Mamba3Config.from_dict`.

    Raises:
        FileNotFoundError: there is none.
        ValueError, TypeError: it is of no model that there is here; the message names the file.
    """
    file = Path(folder) / CONFIG
    data = read_json(file)
    try:
        return Mamba3Config.from_dict(data, a_activation=a_activation)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{file}: {error}") from error


def _check_fit(model: Mamba3LM, tensors: dict[str, torch.Tensor], what: str) -> None:
    """Raise a ValueError that lists all that keeps `tensors` from being the model's.

    Where the head is tied, one of the two names will do; on return only the embedding's is left.
    """
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    head = None
    if model.config.tie_embeddings:
        del expected[HEAD]
        head = tensors.pop(HEAD, None)
        if head is not None:
            tensors.setdefault(EMBEDDING, head)
    problems = [f"missing: {name}" for name in expected if name not in tensors]
    problems += [f"unexpected: {name}" for name in tensors if name not in expected]
    problems += [
        f"wrong shape: {name} is {list(tensors[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and list(tensors[name].shape) != shape
    ]
    if not problems and head is not None:
        embedding = tensors[EMBEDDING]
        is_alias = head.data_ptr() == embedding.data_ptr() and head.shape == embedding.shape
        if not is_alias and not (head.dtype == embedding.dtype and torch.equal(head, embedding)):
            problems.append(
                f"different: {HEAD} and {EMBEDDING}, though tie_embeddings is true; a model with "
                "a head of its own needs tie_embeddings false"
            )
    if problems:
        raise ValueError("\n  ".join([f"{what}:", *problems]))


def tensors_to_save(model: Mamba3LM) -> dict[str, torch.Tensor]:
    """What goes into the file: exactly the tensors that loading will ask for."""
    twin = Mamba3LM(model.config, device="meta")
    tensors = {without_wrappers(name): value for name, value in model.state_dict().items()}
    _check_fit(twin, tensors, "the model does not fit its config and could not be loaded again")
    wide = twin.float32_parameter_names()
    for name, tensor in tensors.items():
        if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} is a {'meta ' if tensor.is_meta else ''}{type(tensor).__name__} of "
                f"{tensor.dtype}, expected a plain tensor of {', '.join(map(str, DTYPES))}: gather "
                "or convert it first"
            )
        if name in wide:
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        # safetensors takes neither strided tensors nor views into a larger one.
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        tensors[name] = tensor
    return tensors
