"""ParamGroupEngine: which rule trains which rows of which parameter, decided once and shown.

Matrices that map features to features go to Muon; vectors, scalars, convolutions and embeddings to
AdamW. Modules say which is which (`parameter_layout`, see `mamba3.layers.layout`); for modules that
do not, an allow-list of torch's own layers does, and what is in neither goes to AdamW without
decay. A fused projection is several matrices: one polar factor over all of its rows would make the
scale of each block's update depend on the others'.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..layers.layout import EMBEDDING, MATRIX, VECTOR, Layout, Rows, blocks

RULES = ("muon", "adamw")
_OVERRIDES = ("rule", "weight_decay", "lr_mul")


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that one rule trains.

    Fields:
        name: of the parameter.
        label: of the rows; "" where they are all of it.
        start, stop: the rows.
        shape: of the rows.
        rule: "muon" or "adamw".
        weight_decay: its own, or None for that of its parameter group.
        lr_mul: factor on the learning rate; 0 leaves the rows as they are, decay included.
        source: who decided.
    """

    name: str
    label: str
    start: int
    stop: int
    shape: tuple[int, ...]
    rule: str
    weight_decay: float | None
    lr_mul: float
    source: str

    @property
    def title(self) -> str:
        """name, or name[label]: what overrides are matched with."""
        return f"{self.name}[{self.label}]" if self.label else self.name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, parameter: Tensor) -> Tensor:
        """The rows, as a view of the parameter or of a tensor of its shape."""
        return parameter[self.start : self.stop] if self.label else parameter


class ParamGroupEngine:
    """Splits a model's trainable parameters into pieces, each owned by one rule.

    Args:
        model: any module. Parameters that need no gradient are shown in the plan and owned by none.
        overrides: what to change, by a pattern with * and ? for names and for name[label], such
            as {"*.in_proj.weight[angle]": "adamw", "*embedding*": {"weight_decay": 0.1}}. Values
            are a rule, or a mapping with any of rule, weight_decay and lr_mul; later ones win. A
            parameter's attribute `_optim`, such a mapping, comes before, and `_no_weight_decay`,
            the mark of the official code, before that.
        split: False takes every parameter as one piece, whatever blocks it has; its rule is then
            "muon" if any of its rows' is.

    Raises:
        ValueError: blocks that do not cover a parameter's rows once; an override that matches
            nothing, or is none; "muon" for what is no matrix; no parameter needs a gradient.

    Example:
        >>> from torch import nn
        >>> engine = ParamGroupEngine(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)))
        >>> [(piece.name, piece.rule) for piece in engine.pieces]
        [('0.weight', 'adamw'), ('1.weight', 'muon'), ('1.bias', 'adamw')]
    """

    def __init__(
        self,
        model: nn.Module,
        overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
        *,
        split: bool = True,
    ):
        named = dict(model.named_parameters())
        self.parameters = {name: p for name, p in named.items() if p.requires_grad}
        self._aliases: dict[str, list[str]] = {}
        first = {id(p): name for name, p in named.items()}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(first[id(p)], []).append(name)
        self.frozen = {name: p for name, p in named.items() if not p.requires_grad}
        if not self.parameters:
            raise ValueError(
                "no parameter of the model needs a gradient: there is nothing to train"
            )
        layouts = _layouts(model)
        self.pieces = [
            piece
            for name, parameter in self.parameters.items()
            for piece in _pieces(name, parameter, *_layout_of(name, parameter, layouts), split)
        ]
        for glob, change in (overrides or {}).items():
            self._override(glob, change)
        for piece in self.pieces:
            check_rule(piece)

    def of(self, name: str) -> list[Piece]:
        """The pieces of a parameter, in the order of their rows."""
        return [piece for piece in self.pieces if piece.name == name]

    def plan(self) -> str:
        """A table: what trains each piece, its shape, decay and learning-rate factor, and why."""
        rows = [("parameter", "shape", "rule", "decay", "lr x", "decided by")]
        for piece in self.pieces:
            decay = "yes" if piece.weight_decay is None else f"{piece.weight_decay:g}"
            decay = "no" if piece.weight_decay == 0 else decay
            shape = "x".join(map(str, piece.shape)) or "scalar"
            rows.append((piece.title, shape, piece.rule, decay, f"{piece.lr_mul:g}", piece.source))
        for name, p in self.frozen.items():
            rows.append((name, "x".join(map(str, p.shape)), "frozen", "-", "-", "requires_grad"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        def total(rule):
            return sum(piece.numel for piece in self.pieces if piece.rule == rule)

        frozen = sum(p.numel() for p in self.frozen.values())
        return (
            f"muon {total('muon'):,} parameters, adamw {total('adamw'):,}, frozen {frozen:,}; "
            'decay "yes" is the group\'s'
        )

    def _override(self, glob: str, change: str | Mapping[str, Any]) -> None:
        values = _change(change, f"override {glob!r}")
        values["source"] = f"override {glob}"
        plain = glob.replace("[", "[[]")  # a bracket is one, not a set of characters
        hits = [
            i
            for i, piece in enumerate(self.pieces)
            if any(
                fnmatch.fnmatchcase(title, plain)
                for name in self._aliases[piece.name]
                for title in (name, replace(piece, name=name).title)
            )
        ]
        if not hits:
            titles = [piece.title for piece in self.pieces]
            near = difflib.get_close_matches(glob, titles, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"override {glob!r} matches no trainable parameter; the nearest is {near!r}"
            )
        for i in hits:
            self.pieces[i] = replace(self.pieces[i], **values)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer of torch: with `weight_decay`, and without any.

    Args:
        model: any module; `ParamGroupEngine` says what decays. A piece's own decay is its group's.
        weight_decay: of the pieces that have none of their own.

    Raises:
        ValueError: as `ParamGroupEngine`; a parameter whose pieces decay differently.
    """
    engine = ParamGroupEngine(model, split=False)
    groups: dict[float, list[Tensor]] = {weight_decay: []}
    for piece in engine.pieces:
        own = weight_decay if piece.weight_decay is None else piece.weight_decay
        groups.setdefault(own, []).append(engine.parameters[piece.name])
    return [{"params": members, "weight_decay": own} for own, members in groups.items() if members]


def check_rule(piece: Piece) -> None:
    """Raise a ValueError if a piece cannot be trained by its rule."""
    if piece.rule == "muon" and len(piece.shape) != 2:
        raise ValueError(
            f"{piece.title} has shape {piece.shape}, and the rule 'muon' is for matrices (rows, "
            "columns); train it with 'adamw'"
        )


def _layouts(model: nn.Module) -> dict[int, tuple[tuple[Rows, ...], str]]:
    """The rows of parameters by their identity, and which module says so.

    What is declared comes before the allow-list. A parameter with two roles, such as a head tied to
    the embedding, is no matrix if one of them says so.
    """
    declared: dict[int, tuple[tuple[Rows, ...], str]] = {}
    fallback: dict[int, tuple[tuple[Rows, ...], str]] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _note(declared, module, {"weight": EMBEDDING}, type(module).__name__)
        for cls, layout in _TORCH_LAYOUTS.items():
            if isinstance(module, cls):
                _note(fallback, module, layout(module), cls.__name__)
    # The name that Hugging Face models give to whatever their head is called.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and getattr(head, "weight", None) is not None:
        _note(declared, head, {"weight": EMBEDDING}, "get_output_embeddings")
    for module in model.modules():
        if hasattr(module, "parameter_layout"):
            _note(declared, module, module.parameter_layout(), type(module).__name__)
    return fallback | declared


def _note(
    found: dict[int, tuple[tuple[Rows, ...], str]], module: nn.Module, layout: Layout, source: str
) -> None:
    """Add what a layout says of a module's parameters, but for those found to be no matrices."""
    for path, rows in layout.items():
        try:
            parameter = operator.attrgetter(path)(module)
        except AttributeError:
            raise ValueError(
                f"the parameter_layout() of {source} names {path}, which it does not have"
            ) from None
        before = found.get(id(parameter))
        if before is None or _is_matrix(before[0]):
            found[id(parameter)] = rows, source


def _linear(module: nn.Linear) -> Layout:
    return {"weight": MATRIX} | ({} if module.bias is None else {"bias": VECTOR})


def _attention(module: nn.MultiheadAttention) -> Layout:
    if module.in_proj_weight is None:
        return {f"{name}_proj_weight": MATRIX for name in "qkv"}
    width = module.embed_dim
    return {"in_proj_weight": blocks(q=width, k=width, v=width)}


_TORCH_LAYOUTS = {nn.Linear: _linear, nn.MultiheadAttention: _attention}


def _layout_of(name: str, parameter: Tensor, layouts: dict) -> tuple[tuple[Rows, ...], str]:
    if (known := layouts.get(id(parameter))) is not None:
        if name.endswith("lm_head.weight") and known[1] == "Linear":
            return EMBEDDING, "lm_head"
        return known
    if parameter.dim() == 2 and ("lora_A" in name or "lora_B" in name):
        return MATRIX, "LoRA"
    return VECTOR, "no layout"


def _pieces(
    name: str, parameter: Tensor, rows: tuple[Rows, ...], source: str, split: bool
) -> Iterator[Piece]:
    """The pieces of one parameter, with what its attributes ask for."""
    counts = [len(parameter) if row.count is None else row.count for row in rows if row.label]
    if counts and (sum(counts) != len(parameter) or min(counts) < 0):
        raise ValueError(
            f"the layout of {source} gives {name} {sum(counts)} rows, and it has {len(parameter)}: "
            "every row must be in one block"
        )
    labels = [row.label for row in rows]
    if len(set(labels)) != len(labels):
        raise ValueError(f"the layout of {source} names a block of {name} twice: {labels}")
    asked = {}
    if getattr(parameter, "_no_weight_decay", False):
        asked = {"weight_decay": 0.0, "source": "_no_weight_decay"}
    if (own := getattr(parameter, "_optim", None)) is not None:
        asked |= {**_change(own, f"{name}._optim"), "source": "_optim"}
    if not split and len(rows) > 1:
        decays = {row.decay for row in rows}
        if len(decays) > 1:
            raise ValueError(f"{name} has rows with decay and rows without: they need split=True")
        rule = "muon" if _is_matrix(rows) else "adamw"
        rows = (Rows("", None, rule, decays.pop()),)
    start = 0
    for row in rows:
        stop = start + (row.count or 0) if row.label else (len(parameter) if parameter.dim() else 0)
        shape = (stop - start, *parameter.shape[1:]) if row.label else tuple(parameter.shape)
        decay = None if row.decay else 0.0
        if stop > start or not row.label:
            piece = Piece(name, row.label, start, stop, shape, row.rule, decay, 1.0, source)
            yield replace(piece, **asked)
        start = stop


def _change(change: str | Mapping[str, Any], where: str) -> dict[str, Any]:
    """What an override sets."""
    values = {"rule": change} if isinstance(change, str) else dict(change)
    for key in values:
        if key not in _OVERRIDES:
            near = difflib.get_close_matches(key, _OVERRIDES, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where} sets {key!r}; the nearest that there is: {near!r}")
    if values.get("rule", "muon") not in RULES:
        raise ValueError(f"{where} asks for the rule {values['rule']!r}, expected one of {RULES}")
    for key in ("weight_decay", "lr_mul"):
        if values.get(key) is not None and not float(values[key]) >= 0:
            raise ValueError(f"{where}: {key} must be at least 0, got {values[key]!r}")
    return values


def _is_matrix(rows: tuple[Rows, ...]) -> bool:
    return any(row.rule == "muon" for row in rows)
