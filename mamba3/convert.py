"""Checkpoints in the forms of other packages, see `mamba3.forms`, and back.

Tensors are never changed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .checkpoint_files import (
    CONFIG,
    DTYPES,
    ENTRIES,
    OFFICIAL,
    SHARD,
    read_json,
    replace_checkpoint,
    write_json,
    write_weights,
)
from .forms import FORMS, WRITERS, form_of
from .hub import EMBEDDING, HEAD, OTHER_EMBEDDING, load_pretrained, tensors_to_save
from .models.lm import Mamba3LM
from .remote import CARD, SMALL_FILES
from .zoo import resolve

# Taken along unchanged when the source has them.
COMPANIONS = tuple(name for name in SMALL_FILES if name != CONFIG)


class Converted(NamedTuple):
    """What a conversion came to.

    source, destination: folders.
    source_form, form: of `mamba3.forms.FORMS`.
    n_parameters: a head tied to the embedding counts once.
    dtype: of the matrices in the destination.
    difference: of the logits from the source's on random ids, RMS over RMS; 0 unless the dtype
        changed.
    files: in the destination.
    """

    source: Path
    destination: Path
    source_form: str
    form: str
    n_parameters: int
    dtype: torch.dtype
    difference: float
    files: list[str]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str,
    dtype: torch.dtype | None = None,
    a_activation: str | None = None,
    overwrite: bool = False,
) -> Converted:
    """Write a checkpoint in the form of another package, checked by loading it again.

    Every tensor must come back as it was, and the logits on random ids with them; until then
    nothing is in the destination.

    Args:
        source: a folder in any of `mamba3.forms.FORMS`, or a name, see `mamba3.zoo.resolve`.
        destination: a folder, made if needed; its other files stay.
        to: the form to write, one of these.
        dtype: of the weights; None keeps the stored one. Parameters that must stay float32 do.
        a_activation: overrides the source's; see `Mamba3Config`.
        overwrite: replace a checkpoint that is in the destination.

    Raises:
        FileExistsError: the destination holds a checkpoint.
        OSError: files that are missing or cannot be written.
        ValueError, TypeError: a source that cannot be used, or that the form cannot express.
        RuntimeError: the written checkpoint is not the source's model.
    """
    if to not in FORMS:
        raise ValueError(f"the form must be one of {', '.join(FORMS)}, got {to!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    asked, source, destination = str(source), resolve(source), Path(destination)
    _check_destination(destination, source, overwrite)
    model = load_pretrained(source, a_activation=a_activation)
    source_form = form_of(read_json(source / CONFIG))
    ids = _random_ids(model.config.vocab_size)
    expected = _logits(model, ids)
    if dtype is not None:
        model = load_pretrained(source, a_activation=model.config.a_activation, dtype=dtype)
    config = WRITERS[to](model.config)

    logits, files = [], []

    def write(folder: Path) -> None:
        _write(model, config, folder, destination, to)
        logits.append(_check_written(model, folder, ids))
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        files.extend(sorted(file.name for file in folder.iterdir()))

    replace_checkpoint(destination, write)
    if to == "mamba3" and not (destination / CARD).exists():
        _write_card(model, destination, asked, source_form, dtype)
        files.append(CARD)
    return Converted(
        source=source,
        destination=destination,
        source_form=source_form,
        form=to,
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=model.backbone.embedding.weight.dtype,
        difference=_difference(logits[0], expected),
        files=files,
    )


def _check_destination(destination: Path, source: Path, overwrite: bool) -> None:
    if destination.exists() and not destination.is_dir():
        raise NotADirectoryError(f"'{destination}' is a file, expected a folder to write into")
    if destination.exists() and destination.samefile(source):
        raise ValueError(f"source and destination are the same folder, {source}; choose another")
    if not overwrite and (held := _checkpoint_files(destination)):
        raise FileExistsError(
            f"'{destination}' already holds {held[0]}; choose another folder, or overwrite"
        )


def _write(model: Mamba3LM, config: dict[str, Any], folder: Path, target: Path, form: str) -> None:
    """Write config and weights into an empty folder, from where they move to the target."""
    tensors, is_tied = tensors_to_save(model), model.config.tie_embeddings
    if form == "mamba_ssm":
        if is_tied:
            tensors[HEAD] = tensors[EMBEDDING]
        torch.save(tensors, folder / OFFICIAL)
    else:
        if form != "mamba3":
            # Else transformers takes the dtype of whichever tensor is first for that of all.
            config |= {"dtype": str(tensors[EMBEDDING].dtype).removeprefix("torch.")}
            if is_tied:  # fla's older versions do not tie what is missing
                tensors[HEAD] = tensors[EMBEDDING].clone()
            tensors[OTHER_EMBEDDING] = tensors.pop(EMBEDDING)
        write_weights(tensors, folder, target, max_shard_size="5GB", metadata={"format": "pt"})
    write_json(folder / CONFIG, config)


def _check_written(model: Mamba3LM, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of what was written, after a check that it is the model."""
    read = load_pretrained(folder)
    expected, got = model.state_dict(), read.state_dict()
    changed = [
        name
        for name, tensor in expected.items()
        if got[name].dtype != tensor.dtype or not torch.equal(got[name], tensor)
    ]
    logits = _logits(read, ids)
    # The tensors lie elsewhere in memory, and BLAS may add in another order for that.
    allowed = 16 * torch.finfo(model.backbone.embedding.weight.dtype).eps
    if changed or not _difference(logits, _logits(model, ids)) <= allowed:
        raise RuntimeError(
            "the written checkpoint does not load as the source's model, and was discarded: "
            + (f"{', '.join(changed)} changed" if changed else "its logits are others")
        )
    return logits


def _random_ids(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (2, 37), generator=generator)


@torch.no_grad()
def _logits(model: Mamba3LM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.double()


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean square of the difference, over that of what is expected."""
    return ((got - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def _write_card(
    model: Mamba3LM, folder: Path, asked: str, source_form: str, dtype: torch.dtype | None
) -> None:
    """A card for a source that has none."""
    from .train.card import write_card

    name = Path(asked).name if Path(asked).is_dir() else asked
    tensors = "are unchanged" if dtype is None else f"were made {str(dtype).removeprefix('torch.')}"
    summary = (
        f"Converted by mamba3 from {name}, a checkpoint in the form {source_form}; its tensors "
        f"{tensors}."
    )
    write_card(folder, model=model, summary=summary)


def _checkpoint_files(folder: Path) -> list[str]:
    """Names of what is of a checkpoint in a folder: config and weights."""
    if not folder.is_dir():
        return []
    names = (file.name for file in folder.iterdir())
    return sorted(n for n in names if n in (CONFIG, *ENTRIES) or SHARD.fullmatch(n))
