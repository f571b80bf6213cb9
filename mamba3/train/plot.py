"""Curves of runs, side by side: loss, exact match, learning rate and tokens a second, as a picture.

They are read from the runs' metrics.jsonl, also while a run goes on. Needs matplotlib, which is
used through its objects: nothing global is set, and no window is opened.
"""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mamba3.atomic import replace_file
from mamba3.train.log import METRICS_FILE

logger = logging.getLogger(__name__)

# What is drawn, by its key in metrics.jsonl.
LOSS, EVAL_LOSS, EXACT_MATCH, LR, SPEED = KEYS = (
    "loss",
    "eval_loss",
    "exact_match",
    "lr",
    "tokens_per_s",
)
# Okabe and Ito's colours, which colour-blind people tell apart, without the yellow that white paper
# swallows; runs beyond these have another line style.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", ":", "-.")
# Steps that a point of a smoothed curve is the median of: a share of all, and at most so many.
SMOOTHED_SHARE, SMOOTHED_MOST = 0.02, 201


class Curve(NamedTuple):
    """Values, and the steps they are of."""

    steps: list[int]
    values: list[float]


def plot(dirs: Iterable[str | Path], out: str | Path, *, log_loss: bool = False) -> None:
    """Draw the curves of runs in four panels.

    Args:
        dirs: folders of runs.
        out: the picture: .png, or another ending that matplotlib knows.
        log_loss: draw the loss on a logarithmic scale.

    Raises:
        FileNotFoundError: no such folder, or no metrics.jsonl in it.
        ValueError: there is nothing to draw; an ending that is no picture's.
        RuntimeError: matplotlib is not installed.
    """
    folders = list(dict.fromkeys(Path(folder).resolve() for folder in dirs))
    runs = dict(zip(names_of(folders), map(read_curves, folders), strict=True))
    figure, out = draw(runs, log_loss=log_loss), Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    kind = out.suffix.removeprefix(".") or "png"
    replace_file(out, lambda file: figure.savefig(file, format=kind))


def read_curves(folder: str | Path) -> dict[str, Curve]:
    """The curves of a run by their key in metrics.jsonl.

    A line that was cut off is left out. Steps that were made once more, as after a rollback, take
    the place of the first ones.

    Raises:
        FileNotFoundError: no such folder, or no metrics.jsonl in it.
    """
    path = Path(folder) / METRICS_FILE
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: expected one that a run writes to")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {METRICS_FILE}: it is no run's folder")
    curves: dict[str, Curve] = {}
    *lines, last = path.read_bytes().split(b"\n")
    damaged = sum(not _read_line(line, curves) for line in lines)
    _read_line(last, curves)  # it has no end: one that is being written, or was cut off
    if damaged:
        logger.warning("%d lines of %s are damaged, and left out", damaged, path)
    return curves


def _read_line(line: bytes, curves: dict[str, Curve]) -> bool:
    """Add what a line holds to curves; whether it could be read."""
    try:
        values = json.loads(line)
        step = int(values["step"])
    except (ValueError, KeyError, TypeError):
        return False
    for key in KEYS:
        if isinstance(value := values.get(key), int | float):
            curve = curves.setdefault(key, Curve([], []))
            first = bisect_left(curve.steps, step)
            del curve.steps[first:], curve.values[first:]
            curve.steps.append(step)
            curve.values.append(float(value))
    return True


def draw(runs: dict[str, dict[str, Curve]], *, log_loss: bool = False) -> Any:
    """The `matplotlib.figure.Figure` of curves, given by key for the name of every run.

    Raises:
        ValueError, RuntimeError: as in `plot`.
    """
    if not any(runs.values()):
        raise ValueError("there is nothing to draw: no run has made a step yet")
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import PercentFormatter
    except ImportError as error:
        raise RuntimeError(
            f"drawing needs matplotlib ({error}): python -m pip install matplotlib"
        ) from error
    figure = Figure(figsize=(11, 7.5), dpi=120, layout="constrained")
    panels = figure.subplots(2, 2)
    loss, exact, lr, speed = panels.flat
    styles = [_style(i) for i in range(len(runs))]
    for (name, curves), style in zip(runs.items(), styles, strict=True):
        style = {"label": name, **style}
        for panel, key in ((loss, LOSS), (speed, SPEED)):
            if key in curves:
                _draw_smoothed(panel, curves[key], **style)
        for panel, key, marker in ((loss, EVAL_LOSS, "o"), (exact, EXACT_MATCH, "o"), (lr, LR, "")):
            if key in curves:
                panel.plot(*curves[key], marker=marker, markersize=4, **style)
    evaluated = any(EVAL_LOSS in curves for curves in runs.values())
    loss_title = "loss (dots: evaluation)" if evaluated else "loss"
    titles = (loss_title, "exact match", "learning rate", "tokens/s")
    for panel, title in zip(panels.flat, titles, strict=True):
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    if log_loss:
        loss.set_yscale("log")
    exact.yaxis.set_major_formatter(PercentFormatter(1))
    for panel in (exact, lr, speed):
        panel.set_ylim(bottom=0)
    handles = [Line2D([], [], **style) for style in styles]
    figure.legend(handles, list(runs), loc="outside lower center", ncols=min(len(runs), 4))
    return figure


def _style(i: int) -> dict[str, str]:
    """How run number i looks."""
    style, colour = divmod(i, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": STYLES[style % len(STYLES)]}


def _draw_smoothed(panel: Any, curve: Curve, label: str, **style: str) -> None:
    """A curve's running median, and the curve itself faintly behind it."""
    window = int(min(SMOOTHED_SHARE * len(curve.steps), SMOOTHED_MOST))
    if window > 1:
        panel.plot(*curve, alpha=0.25, linewidth=0.6, **style)
    panel.plot(curve.steps, running_median(curve.values, window), label=label, **style)


def running_median(values: Sequence[float], window: int) -> list[float]:
    """The median of the finite values in a window around each one, which is shorter at the ends.

    Args:
        values: any number of them.
        window: how many values it spans; an even number spans one more.

    Returns:
        As many; nan where none in the window is finite.
    """
    half, ordered, medians = window // 2, [], []
    for i in range(-half, len(values)):
        if 0 <= i + half < len(values) and math.isfinite(new := values[i + half]):
            insort(ordered, new)
        if i > half and math.isfinite(old := values[i - half - 1]):
            del ordered[bisect_left(ordered, old)]
        if i >= 0:
            middle = len(ordered) // 2
            both = ordered[middle - (len(ordered) % 2 == 0) : middle + 1]
            medians.append(sum(both) / len(both) if ordered else math.nan)
    return medians


def names_of(folders: Sequence[Path]) -> list[str]:
    """Short names that tell folders apart: the last parts of their paths."""
    for depth in range(1, max((len(folder.parts) for folder in folders), default=0)):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
