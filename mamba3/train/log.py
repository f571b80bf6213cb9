"""What a run logs: metrics.jsonl, one JSON object a line; TensorBoard and trackio if asked for.

Training lines hold `step` and `loss` (floats are written so that they read back to the same bits),
evaluation lines `step` and `exact_match`. `step` is the number of optimizer steps made.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mamba3.atomic import replace_file

if TYPE_CHECKING:
    from mamba3.train.config import Recipe

METRICS_FILE = "metrics.jsonl"
# OUT/tensorboard, and the project of all runs in trackio.
TENSORBOARD_FOLDER = "tensorboard"
TRACKIO_PROJECT = "mamba3"
logger = logging.getLogger(__name__)


class TensorBoard:
    """Feeds TensorBoard: event files in OUT/tensorboard.

    Args:
        module: `torch.utils.tensorboard`.
        out: folder of the run.
        last_step: later steps that are there already are hidden.
        recipe: of the run, which is not shown.
    """

    module, package = "torch.utils.tensorboard", "tensorboard"

    def __init__(self, module: ModuleType, out: Path, *, last_step: int, recipe: Mapping[str, Any]):
        self._writer = module.SummaryWriter(
            str(out / TENSORBOARD_FOLDER), purge_step=last_step + 1, flush_secs=30
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of every name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Trackio:
    """Feeds trackio: a run that is named after its folder, in the project "mamba3".

    A run that continues goes on in the run of that name. trackio cannot take back the steps that
    this one had made after its checkpoint, and has them twice.

    Args:
        module: `trackio`.
        out: folder of the run.
        last_step: of the checkpoint that a run continues from.
        recipe: of the run, shown as its settings.
    """

    module = package = "trackio"

    def __init__(self, module: ModuleType, out: Path, *, last_step: int, recipe: Mapping[str, Any]):
        self._trackio = module
        # It greets on standard output, where results are.
        with contextlib.redirect_stdout(sys.stderr):
            module.init(
                project=TRACKIO_PROJECT,
                name=out.resolve().name,
                config=dict(recipe),
                resume="allow" if last_step else "never",
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of every name."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


LOGGERS = {"tensorboard": TensorBoard, "trackio": Trackio}


class MetricsLog:
    """Appends to a metrics file, and feeds the numbers of every line to loggers.

    A logger that fails, as on a network that is gone, is said and left out from then on.

    Args:
        path: the file; made if needed. None writes nothing.
        last_step: lines of later steps, and a last line that was cut off, are dropped first. A run
            that continues from a checkpoint gives the checkpoint's step, a new one 0.
        loggers: by name, as `open_log` starts them.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        last_step: int,
        loggers: Mapping[str, TensorBoard | Trackio] | None = None,
    ):
        self.path = None if path is None else Path(path)
        self._loggers = dict(loggers or {})
        if self.path is None:
            return
        kept = []
        if self.path.exists():
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _is_up_to(line, last_step)]
        replace_file(self.path, lambda file: file.writelines(kept))

    def write(self, step: int, **values: Any) -> None:
        """Append one line; the entries of a mapping are group/name to loggers."""
        if self.path is None:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        scalars = dict(_scalars(values))
        for name, own in list(self._loggers.items()):
            try:
                own.write(step, scalars)
            except Exception as error:  # whatever it is, the run does not depend on it
                del self._loggers[name]
                self._warn(f"{name} failed at step {step} and gets nothing more", error)

    def close(self) -> None:
        """Let loggers write what is left."""
        while self._loggers:
            name, own = self._loggers.popitem()
            try:
                own.close()
            except Exception as error:
                self._warn(f"{name} failed to finish", error)

    def _warn(self, what: str, error: Exception) -> None:
        kind = type(error).__name__
        logger.warning("%s: %s: %s. %s has every line", what, kind, error, self.path)


def open_log(out: str | Path | None, recipe: Recipe, *, last_step: int) -> MetricsLog:
    """The log of a run: OUT/metrics.jsonl, and the recipe's loggers. It is to be closed.

    Args:
        out: folder of the run, which exists. None, for ranks that have nothing to tell, writes
            nothing and starts no logger.
        recipe: of the run, shown by loggers that show such things.
        last_step: step of the checkpoint that the run continues from, 0 for a new one.

    Raises:
        ValueError: train.loggers names one that there is not.
        RuntimeError: it names one that is not installed, or does not start.
    """
    loggers = recipe.train.loggers
    check_loggers(loggers)
    if out is None:
        return MetricsLog(None, last_step=last_step)
    out, started = Path(out), {}
    try:
        for name in loggers:
            started[name] = _start(name, out, last_step=last_step, recipe=recipe.to_dict())
    except RuntimeError:
        for own in started.values():
            own.close()
        raise
    return MetricsLog(out / METRICS_FILE, last_step=last_step, loggers=started)


def check_loggers(names: Iterable[str]) -> None:
    """Raise a ValueError for a name that is no logger's, or is there twice."""
    names = list(names)
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"loggers must be some of {', '.join(LOGGERS)}, got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"loggers names one twice: {names}")


def _start(name: str, out: Path, **options: Any) -> TensorBoard | Trackio:
    """A logger, or a RuntimeError that says what is to be done."""
    cls = LOGGERS[name]
    try:
        module = importlib.import_module(cls.module)
    except ImportError as error:
        raise RuntimeError(
            f"train.loggers asks for {name}, which is not installed ({error}): "
            f"python -m pip install {cls.package}"
        ) from error
    try:
        return cls(module, out, **options)
    except Exception as error:
        raise RuntimeError(
            f"train.loggers asks for {name}, which does not start: {type(error).__name__}: {error}"
        ) from error


def _scalars(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, float]]:
    """The numbers among values, those of a mapping as group/name."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{group}{name}/")
        elif isinstance(value, int | float):
            yield f"{group}{name}", float(value)


def _is_up_to(line: bytes, last_step: int) -> bool:
    try:
        return json.loads(line)["step"] <= last_step
    except (ValueError, KeyError, TypeError):
        return False
