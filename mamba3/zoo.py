"""The models that have a name, and where the weights of any model are.

Only what a folder cannot say itself stands in the table: results stand in a model's card,
README.md. Of the official models only what is known is said: None is "not known here".
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .config import Mamba3Config
    from .models.lm import Mamba3LM

WEIGHTS = Path(__file__).parent / "weights"

HUB, LOCAL = "hf-hub:", "local-dir:"
BEST = "best"
_PART = r"[A-Za-z0-9][\w.-]*"
HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@\s]+))?")


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """A named model.

    Args:
        name: what users type.
        description: one line for a list.
        licence: SPDX identifier of the weights' licence.
        repo_id: on the Hugging Face Hub; None for a model that ships with the package.
        revision: the commit of `repo_id` that is loaded; None takes its main branch.
        architecture: arguments of `Mamba3Config`; not needed for a shipped model.
        weights: their files in `repo_id`.
        size: of the weights' file, in bytes.
        tokenizer: where its tokenizer is.
        context: tokens of the sequences that it was trained on.
        citation: what to cite.
        stages: of the arithmetic curriculum that it was trained on.
        form: how numbers are written inside of it, as in "answers lsd_first, operands interleaved".
        notes: what else one should know, a sentence each.
    """

    name: str
    description: str
    licence: str | None = None
    repo_id: str | None = None
    revision: str | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    weights: str = "pytorch_model.bin"
    size: int | None = None
    tokenizer: str | None = None
    context: int | None = None
    citation: str | None = None
    stages: tuple[int, ...] = ()
    form: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_shipped(self) -> bool:
        """Whether the weights are part of the package."""
        return self.repo_id is None

    @property
    def source(self) -> str:
        """Where the weights come from: the folder, or "hf-hub:org/name@revision"."""
        if self.is_shipped:
            return str(self.path)
        return f"{HUB}{self.repo_id}" + (f"@{self.revision}" if self.revision else "")

    @property
    def path(self) -> Path:
        """Folder of a shipped model, with config.json, weights, tokenizer and card."""
        return WEIGHTS / self.name

    def config(self) -> Mamba3Config:
        """The architecture, without a download."""
        from .config import Mamba3Config
        from .hub import read_config

        return read_config(self.path) if self.is_shipped else Mamba3Config(**self.architecture)

    def parameters(self) -> int:
        """Number of parameters; the embedding and a head tied to it count once."""
        from .models.lm import Mamba3LM

        model = Mamba3LM(self.config(), device="meta")
        return sum(parameter.numel() for parameter in model.parameters())


def _mamba3(
    tag: str,
    d_model: int,
    n_layer: int,
    d_intermediate: int,
    *,
    revision: str | None = None,
    size: int | None = None,
) -> ZooModel:
    """An official Mamba-3 checkpoint of July 2026; they differ in nothing else."""
    is_mimo = tag.startswith("mimo")
    form = "MIMO of rank 4" if is_mimo else "SISO"
    return ZooModel(
        name=f"mamba3-{tag}",
        description=f"official base model, {form}; 100B tokens of FineWeb-Edu (English)",
        repo_id=f"state-spaces/mamba3-{tag}",
        revision=revision,
        architecture={
            "vocab_size": 128256,
            "d_model": d_model,
            "n_layer": n_layer,
            "d_intermediate": d_intermediate,
            "is_mimo": is_mimo,
        },
        size=size,
        tokenizer="Llama 3.1, in the gated repository meta-llama/Llama-3.1-8B; it is not among the "
        "model's files. <|end_of_text|> ends a text",
        context=2048,
        citation="Lahoti, Li, Chen, Wang, Bick, Kolter, Dao and Gu: Mamba-3: Improved Sequence "
        "Modeling using State Space Principles. arXiv:2603.15569 (2026)",
        notes=(
            "The weights are a pickle in bfloat16, read without running code.",
            f"Licence: see https://huggingface.co/state-spaces/mamba3-{tag}.",
        ),
    )


def _mamba(size: str, d_model: int, n_layer: int) -> tuple[ZooModel, ZooModel]:
    """An official Mamba-1 checkpoint of December 2023, and the same in transformers' form."""
    official = ZooModel(
        name=f"mamba-{size}",
        description="official base model of Mamba-1; 300B tokens of the Pile (English)",
        licence="Apache-2.0",
        repo_id=f"state-spaces/mamba-{size}",
        architecture={
            "layers": "mamba",
            "vocab_size": 50277,
            "d_model": d_model,
            "n_layer": n_layer,
            "pad_vocab_size_multiple": 8,
        },
        tokenizer="GPT-NeoX, of EleutherAI/gpt-neox-20b; it is not among the model's files",
        context=2048,
        citation="Gu and Dao: Mamba: Linear-Time Sequence Modeling with Selective State Spaces. "
        "arXiv:2312.00752 (2023)",
    )
    transformers = dataclasses.replace(
        official,
        name=f"{official.name}-hf",
        description=f"{official.description}; with its tokenizer",
        repo_id=f"{official.repo_id}-hf",
        architecture=official.architecture | {"vocab_size": 50280, "pad_vocab_size_multiple": 1},
        weights="safetensors",
        tokenizer="GPT-NeoX, among the model's files",
    )
    return official, transformers


def _skills() -> list[ZooModel]:
    """The skills that ship: every folder of weights that comes with what was measured of it."""
    found = []
    for path in sorted(WEIGHTS.glob("*/eval.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.append(
            ZooModel(
                name=path.parent.name,
                description=f"{record['description']} (stages "
                f"{', '.join(map(str, record['stages']))}; {record['form']})",
                licence="Apache-2.0",
                tokenizer="among the model's files, one character a token",
                stages=tuple(record["stages"]),
                form=record["form"],
            )
        )
    return found


MODELS = {
    model.name: model
    for model in (
        *_skills(),
        ZooModel(
            name="arithmetic-tiny",
            description="copy, reverse, successor and comparison of numbers of 1-4 digits; "
            "single-digit addition and subtraction",
            licence="Apache-2.0",
            tokenizer="among the model's files, one character a token",
            stages=(1, 2),
            form="answers msd_first, operands plain",
        ),
        _mamba3(
            *("siso-187m", 768, 12, 1536),
            revision="6792c27c00f3bb41506db1066dcd1c51bb0f4b02",
            size=373_744_619,
        ),
        _mamba3("siso-443m", 1024, 24, 2048),
        _mamba3(
            *("siso-893m", 1536, 24, 3072), revision="e205b6e6d6075d089140d2e9170970aabc05c481"
        ),
        _mamba3(
            *("siso-1.5b", 2048, 24, 4096), revision="5cfc721542ec9ccee768088b2fd6b7e8101219d8"
        ),
        _mamba3(
            *("mimo-187m", 768, 12, 1264),
            revision="8fd6e9eb7b795f2e15d7f6353251d0137980c43e",
            size=374_640_827,
        ),
        _mamba3("mimo-444m", 1024, 24, 1792),
        _mamba3(
            *("mimo-894m", 1536, 24, 2800), revision="b5c7db27d1c7781d27c203bfd18601b3bbff7bc0"
        ),
        _mamba3(
            *("mimo-1.5b", 2048, 24, 3824), revision="bc6b5d0f7994fe4cb3478242e92da8daf9ee29ec"
        ),
        *_mamba("130m", 768, 24),
        *_mamba("370m", 1024, 48),
        *_mamba("790m", 1536, 48),
        *_mamba("1.4b", 2048, 48),
        *_mamba("2.8b", 2560, 64),
        dataclasses.replace(
            _mamba("2.8b-slimpj", 2560, 64)[0],
            description="official base model of Mamba-1; 600B tokens of SlimPajama (English)",
        ),
        ZooModel(
            name="falcon-mamba-7b",
            description="base model of Mamba-1 with norms in its mixers; 5.8T tokens, mostly of "
            "the web (English)",
            repo_id="tiiuae/falcon-mamba-7b",
            architecture={
                "layers": "mamba",
                "mamba": {"maps_norm_eps": 1e-6},
                "vocab_size": 65024,
                "d_model": 4096,
                "n_layer": 64,
                "tie_embeddings": False,
                "pad_vocab_size_multiple": 1,
            },
            weights="safetensors",
            tokenizer="Falcon, among the model's files",
            context=8192,
            citation="Zuo et al.: Falcon Mamba: The First Competitive Attention-free 7B Language "
            "Model. arXiv:2410.05355 (2024)",
            notes=(
                "Licence: TII Falcon-Mamba License 2.0, see "
                "https://falconllm.tii.ae/falcon-mamba-7b-terms-and-conditions.html.",
            ),
        ),
    )
}


def list_models(filter: str = "*", *, shipped: bool | None = None) -> list[str]:
    """Names of models, sorted.

    Args:
        filter: a shell pattern for the names, such as "arithmetic-*"; one for what follows
            "mamba3-", such as "mimo*", will do.
        shipped: True for those that ship with the package alone, False for the others, None for
            all.
    """
    return sorted(
        name
        for name, model in MODELS.items()
        if any(fnmatch.fnmatch(part, filter) for part in (name, name.removeprefix("mamba3-")))
        and shipped in (None, model.is_shipped)
    )


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """Find the folder of a model; one on the Hugging Face Hub is downloaded into its cache first.

    Args:
        name_or_path: a name of `list_models()`; a local folder, or "local-dir:FOLDER"; a model on
            the Hub, "org/name", "org/name@revision" or "hf-hub:org/name". A `Path` is always a
            folder, and so is a string that starts with "./", "../" or "/".
        revision: branch, tag or commit, for a model on the Hub.
        token: of the Hub; None takes the one that is logged in, False none.
        local_files_only: take what the cache holds, and ask the Hub nothing. HF_HUB_OFFLINE=1 does
            so everywhere.

    Returns:
        The folder; it exists.

    Raises:
        FileNotFoundError: no such model or folder, also on the Hub or, without it, in the cache.
        NotADirectoryError: a file.
        PermissionError: the Hub refuses the model to this user.
        OSError: the Hub cannot be reached, or fails.
        ValueError: a string that is a model and a folder here, or empty; a revision of a folder.
    """
    if not str(name_or_path):
        raise ValueError("the model's name or folder is empty; write '.' for this folder")
    found = _remote(name_or_path)
    if found is None:
        if revision is not None:
            raise ValueError(
                f"'{name_or_path}' is no model on the Hub: it has no revision {revision!r}"
            )
        return _local(name_or_path)
    repo_id, named = found
    if revision and "@" in str(name_or_path):
        raise ValueError(f"'{name_or_path}' names a revision, and revision={revision!r} another")
    from .remote import download

    try:
        return download(
            repo_id, revision=revision or named, token=token, local_files_only=local_files_only
        )
    except FileNotFoundError as error:
        if HUB_ID.fullmatch(name_or_path):
            raise FileNotFoundError(f"'{name_or_path}' is no folder here, and {error}") from error
        raise


def _remote(name: str | os.PathLike[str]) -> tuple[str, str | None] | None:
    """Repository and revision of what is on the Hub; None for what is in a local folder.

    Raises:
        ValueError: what could be either.
    """
    if not isinstance(name, str):
        return None
    if name.startswith(HUB):
        match = HUB_ID.fullmatch(name.removeprefix(HUB))
        if match is None:
            raise ValueError(f"{name!r} is no model on the Hub: expected hf-hub:org/name@revision")
        return match["repo"], match["revision"]
    model, match = MODELS.get(name), HUB_ID.fullmatch(name)
    if model is None and match is None:
        return None
    if Path(name).is_dir():
        what, fix = "a model on the Hugging Face Hub", f"{HUB}{name}"
        if model is not None:
            what, fix = f"a {'shipped ' if model.is_shipped else ''}model", model.source
        raise ValueError(
            f"{name!r} is a folder here, and may be {what}. Write './{name}' for the folder, or "
            f"'{fix}' for the model"
        )
    if model is None:
        return match["repo"], match["revision"]
    return None if model.is_shipped else (model.repo_id, model.revision)


def _local(name_or_path: str | os.PathLike[str]) -> Path:
    model = MODELS.get(name_or_path) if isinstance(name_or_path, str) else None
    if model is not None:
        if not model.path.is_dir():
            raise FileNotFoundError(
                f"the weights of {name_or_path!r} are missing from this installation: expected the "
                f"folder {model.path}. Reinstall mamba3"
            )
        return model.path
    folder = Path(name_or_path)
    if isinstance(name_or_path, str):
        folder = Path(name_or_path.removeprefix(LOCAL))
    if folder.is_dir():
        return folder
    if folder.exists():
        raise NotADirectoryError(
            f"'{folder}' is a file, expected the folder that holds config.json and the weights"
        )
    near = difflib.get_close_matches(str(name_or_path), MODELS, n=3)
    raise FileNotFoundError(
        f"'{name_or_path}' is neither a local folder nor a model with a name"
        + (f"; did you mean {' or '.join(near)}?" if near else ".")
        + f" Named models: {', '.join(list_models())}. Others on the Hugging Face Hub are called "
        "org/name"
    )


def public_name(name_or_path: str) -> str:
    """What a card calls a model: its repository on the Hub, or the name that says least of a disk.

    Args:
        name_or_path: as of `resolve`.
    """
    model = MODELS.get(name_or_path)
    if model is not None:
        return model.repo_id or model.name
    path = name_or_path.removeprefix(LOCAL)
    if name_or_path.startswith((LOCAL, "./", "../", "/")) or Path(path).is_dir():
        folder = Path(path).absolute()
        # The best model of a run lies in a folder of the run's, and is called as the run is.
        return folder.parent.name if folder.name == BEST else folder.name
    return name_or_path.removeprefix(HUB).partition("@")[0]


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Mamba3LM:
    """Load a model by its name, from a local folder or from the Hub, in evaluation mode.

    Args:
        name_or_path: a name of `list_models()`, a folder, or a model on the Hub, see `resolve`.
        revision, token, local_files_only: for a model on the Hub, see `resolve`.
        dtype: of the weights; None keeps the stored one. Parameters that must stay float32 do.
        device: where the weights go; None is the CPU.

    Raises:
        OSError: nothing there, see `resolve`.
        ValueError, TypeError: files that cannot be used, see `mamba3.hub.load_pretrained`.

    Example:
        >>> model = load_model("arithmetic-tiny")
    """
    from .hub import load_pretrained

    return load_pretrained(
        name_or_path,
        revision=revision,
        token=token,
        local_files_only=local_files_only,
        dtype=dtype,
        device=device,
    )
