"""Training steps of the 187M models on 1 to 8 GPUs: how time, memory and communication scale.

    torchrun --standalone --nproc-per-node=1 scripts/bench_scaling.py --json 1.json
    torchrun --standalone --nproc-per-node=2 scripts/bench_scaling.py --json 2.json
    torchrun --standalone --nproc-per-node=4 scripts/bench_scaling.py --json 4.json
    torchrun --standalone --nproc-per-node=8 scripts/bench_scaling.py --json 8.json
    python scripts/bench_scaling.py --table 1.json 2.json 4.json 8.json

    torchrun --standalone --nproc-per-node=8 scripts/bench_scaling.py --write DIR
    torchrun --standalone --nproc-per-node=4 scripts/bench_scaling.py --read DIR
    torchrun --standalone --nproc-per-node=1 scripts/bench_scaling.py --read DIR

The models, vocabulary and tokens of `bench_training.py`. Weak scaling is 8 rows of 2048 tokens a
GPU, strong scaling 64 rows in all. Before weak scaling is timed, the losses of 50 steps are
compared with those of one GPU that computes the same rows in as many parts. The second group of
commands checks that checkpoints resume on fewer GPUs, with the same next losses. `--quick` goes
through all of it with tiny models, on a CPU where there are too few GPUs, and measures nothing.

step       milliseconds of a step, one behind the other, on the slowest rank; recorded where that
           can be
optimizer  median of `optimizer.update()` by itself there, recorded where steps are. For "sharded"
           it averages the gradients too, and clips them, which for the others is not part of it
hidden     share of the time of NCCL's kernels in which others run, on rank 0
peak       GB allocated at most, on the rank that needs most; on a CPU those of the process
efficiency tokens/s over those of one GPU with the same optimizer, times the number of GPUs
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_ranks import overlap
from bench_training import COMMON, FORMS, TIMED, TOGETHER, show, trace_events

from mamba3 import Mamba3Config, Mamba3LM
from mamba3.cuda_graph import record
from mamba3.data.problems import Batch
from mamba3.leave import leave_after
from mamba3.train import memory
from mamba3.train.checkpoint import Checkpoints
from mamba3.train.config import OptimRecipe, StepRecipe
from mamba3.train.loop import make_step
from mamba3.train.parallel import Ranks, ranks_of
from mamba3.train.step_cache import CachedStep

# Optimizer and step, as of `TOGETHER`, on one GPU and on several.
ALONE = {"one adamw": TOGETHER["ddp, recorded"], "one hybrid": TOGETHER["ddp, recorded, hybrid"]}
SHARED = {
    "ddp adamw": TOGETHER["ddp, recorded"],
    "allreduce adamw": TOGETHER["allreduce in bf16"],
    "fsdp adamw": TOGETHER["fsdp"],
    "ddp hybrid": TOGETHER["ddp, recorded, hybrid"],
    "sharded hybrid": TOGETHER["sharded, hybrid"],
}
SCALINGS = ("weak", "strong")
# Largest relative difference of losses: of all steps that are checked, told at the end; and after a
# checkpoint, when rounding has had no time to grow, and an optimizer without its state makes 7e-4
# (--quick).
TOLERANCE = 1e-3
RESUMED_TOLERANCE = 1e-4
# Steps before a checkpoint, and after it.
BEFORE, AFTER = 10, 3
NO_MEASUREMENT = "Tiny models: these numbers show that the script runs, and are no measurement."


class Size(NamedTuple):
    """What is measured.

    Fields:
        model: what differs from the official architectures.
        weak, strong: rows a rank, and rows in all.
        length: tokens in a row.
        checked, timed: steps whose losses are compared, and steps that are timed.
        precision: of the steps.
    """

    model: dict[str, int]
    weak: int
    strong: int
    length: int
    checked: int
    timed: int
    precision: str


TINY = {
    "vocab_size": 64, "d_model": 16, "n_layer": 2, "headdim": 8, "d_state": 8, "d_intermediate": 24,
}  # fmt: skip
FULL = Size({}, 8, 64, 2048, checked=50, timed=TIMED, precision="bf16")
QUICK = Size(TINY, 2, 8, 16, checked=4, timed=2, precision="float32")


class Setting(NamedTuple):
    """Sizes, and who computes them on what."""

    size: Size
    ranks: Ranks
    device: torch.device


class Row(NamedTuple):
    """A row of the table; None is what there is not, as communication on one GPU."""

    form: str
    mode: str
    optimizer: str
    scaling: str
    gpus: int
    rows: int
    recorded: bool
    step_ms: float
    tokens_per_s: float
    optimizer_ms: float
    nccl_ms: float | None
    hidden: float | None
    peak_gb: float
    losses_within: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--form", choices=FORMS, nargs="+", default=list(FORMS), help="which models"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, which measure nothing")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    parser.add_argument("--append", metavar="FILE", help="add the table to this Markdown file")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--table", metavar="FILE", nargs="+", help="only the table of such results")
    modes.add_argument("--write", metavar="DIR", help="only save checkpoints here")
    modes.add_argument("--read", metavar="DIR", help="only go on from the checkpoints here")
    args = parser.parse_args()
    if args.table:
        tell([json.loads(Path(file).read_text()) for file in args.table], args.append)
        return
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if gpus < local and not args.quick:
        raise SystemExit(
            f"bench_scaling.py needs a GPU for each of {local} ranks, and found {gpus}; "
            "--quick goes through it on a CPU"
        )
    device = "cuda" if gpus >= local else "cpu"
    memory.configure(device)
    with ranks_of(device) as ranks:
        if not ranks.first:
            logging.disable(logging.WARNING)  # all ranks would say the same
        setting = Setting(QUICK if args.quick else FULL, ranks, torch.device(device))
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "torch": torch.__version__,
            "gpus": ranks.world,
            "quick": args.quick,
        }
        show(ranks, headline(about))
        if args.write or args.read:
            for form in args.form:
                (write if args.write else read)(form, Path(args.write or args.read), setting)
        else:
            results = measure_all(args.form, setting, about, args.json)
            if ranks.first:
                tell([results], args.append)
            check(results)
        # gloo's threads may still hold tensors, and a rank that ends meanwhile aborts.
        ranks.wait()


# steps


class Run:
    """A model with its step, and four batches of random tokens, which take turns."""

    def __init__(
        self, form: str, how: tuple[str, dict], rows: int, setting: Setting, accumulate: int = 1
    ):
        size, ranks, device = setting
        if device.type == "cuda":
            gc.collect()  # a run before this one, whose memory is not to count
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        optimizer, options = how
        changes = {"precision": size.precision, "accumulate": accumulate}
        recipe = StepRecipe(**options | changes)
        torch.manual_seed(0)
        model = Mamba3LM(Mamba3Config(**COMMON | FORMS[form] | size.model), device=device)
        self.setting = setting
        self.step = make_step(model, OptimRecipe(lr=1e-4, name=optimizer), recipe, ranks)
        self.cached = CachedStep(self.step, records=recipe.cache_steps)
        generator = torch.Generator().manual_seed(1)
        shape, vocabulary = (rows, size.length), model.config.vocab_size
        ids = [torch.randint(vocabulary, shape, generator=generator) for _ in range(4)]
        self._batches = [Batch(own, own, own.numel()) for own in ids]
        self._parts = [self.step.parts(batch) for batch in self._batches]
        self._made = 0

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed."""
        return self.cached.recordings > 0

    def losses(self, count: int, start: int | None = None) -> torch.Tensor:
        """Of the next steps, or of those from `start` on."""
        self._made = self._made if start is None else start
        return torch.stack([self._next().loss.clone() for _ in range(count)]).cpu()

    def warm_up(self) -> None:
        """Steps until they are recorded, where they can be, and two more."""
        if self.step.device.type != "cuda":
            return
        while self._made < self.cached.warm_up + 2:
            self._next()

    def step_ms(self) -> float:
        """Of a step, while the host is ahead."""
        began, steps = self._begin(), self.setting.size.timed
        for _ in range(steps):
            self._next()
        return self._since(began) / steps

    def optimizer_ms(self) -> float:
        """Median of an update by itself, that all ranks begin at the same time."""
        batch, world, optimizer = self._batches[0], self.setting.ranks.world, self.step.optimizer
        # Gradients, by a step that is not recorded; its rows do not matter, and few fit in memory
        # beside a recording.
        ids = batch.input_ids[:world]
        self.step(Batch(ids, ids, ids.numel()))
        update = optimizer.update
        if self.recorded:
            update = record(update, self.step.device, stream=self.step.stream)
        times = []
        for _ in range(self.setting.size.timed):
            optimizer.advance()
            began = self._begin()
            update()
            times.append(self._since(began))
        return statistics.median(times)

    def communication(self) -> tuple[float | None, float | None]:
        """Milliseconds of NCCL's kernels in a step, and the share of it that is hidden."""
        if self.setting.ranks.world == 1 or self.step.device.type != "cuda":
            return None, None
        steps = 3
        nccl, hidden = overlap(trace_events(lambda: [self._next() for _ in range(steps)]))
        return nccl / steps, hidden

    def _next(self):
        self._made += 1
        return self.cached.make(self._parts[(self._made - 1) % 4])

    def _begin(self) -> float:
        """The time at which no rank has anything left to do."""
        self.setting.ranks.wait()
        self._wait()
        return time.perf_counter()

    def _since(self, began: float) -> float:
        """Milliseconds until the work since then is done."""
        self._wait()
        return 1e3 * (time.perf_counter() - began)

    def _wait(self) -> None:
        if self.step.device.type == "cuda":
            torch.cuda.synchronize()


def largest_difference(losses: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of all steps, relative."""
    return (losses / wanted - 1).abs().max().item()


def check(results: dict[str, Any]) -> None:
    """Exits if losses of any row are not those of one GPU."""
    far = [
        f"{row['form']} {row['mode']}: losses are off by {row['losses_within']:.1e}"
        for row in results["rows"]
        if row["losses_within"] is not None and not row["losses_within"] <= TOLERANCE
    ]
    if far:
        raise SystemExit(f"{'; '.join(far)}, more than {TOLERANCE}")


# measuring


def measure_all(
    forms: list[str], setting: Setting, about: dict[str, Any], file: str | None
) -> dict[str, Any]:
    """Rows of all modes, in the file as soon as they are there."""
    size, ranks, _ = setting
    results = {**about, "rows": []}
    for form in forms:
        wanted: dict[str, torch.Tensor] = {}
        for mode, how in (ALONE if ranks.world == 1 else SHARED).items():
            if ranks.world > 1 and how[0] not in wanted:
                show(ranks, f"{form} {how[0]}: one process computes {size.checked} steps")
                wanted[how[0]] = losses_of_one(form, how, setting)
            found: dict[int, Row | None] = {}
            for scaling, rows in zip(SCALINGS, (size.weak * ranks.world, size.strong), strict=True):
                if rows % ranks.world:
                    show(ranks, f"{form} {mode}: {rows} rows are no multiple of {ranks.world}")
                    continue
                if rows not in found:
                    expected = wanted.get(how[0]) if scaling == "weak" else None
                    found[rows] = measure(form, mode, how, rows, setting, expected)
                if found[rows] is None:
                    continue
                row = found[rows]._replace(scaling=scaling)
                results["rows"].append(row._asdict())
                texts = columns(row, None).items()
                show(ranks, ", ".join(f"{name} {text}" for name, text in texts if text != "-"))
                if file and ranks.first:
                    Path(file).write_text(json.dumps(results, indent=1))
    return results


def losses_of_one(form: str, how: tuple[str, dict], setting: Setting) -> torch.Tensor:
    """Of one process, which computes every rank's rows one after the other."""
    size, ranks, _ = setting
    alone = setting._replace(ranks=Ranks())
    run = Run(form, how, size.weak * ranks.world, alone, accumulate=ranks.world)
    return run.losses(size.checked)


def measure(
    form: str, mode: str, how: tuple[str, dict], rows: int, setting: Setting,
    wanted: torch.Tensor | None,
) -> Row | None:  # fmt: skip
    """A row; None if one GPU has too little memory for it."""
    size, ranks, device = setting
    try:
        run = Run(form, how, rows, setting)
        within = None
        if wanted is not None:
            within = largest_difference(run.losses(size.checked), wanted)
            show(ranks, f"{form} {mode}: losses of {size.checked} steps within {within:.1e}")
        run.warm_up()
        step_ms = run.step_ms()
        nccl_ms, hidden = run.communication()
        peak = memory.report(device).peak / 1e9
        optimizer_ms = run.optimizer_ms()
    except torch.OutOfMemoryError:
        if ranks.world > 1:  # the others wait for this rank
            raise
        show(ranks, f"{form} {mode}: {rows} rows do not fit in the memory of one GPU")
        return None
    if ranks.world > 1:
        slowest = torch.tensor([step_ms, optimizer_ms, peak], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        step_ms, optimizer_ms, peak = slowest.tolist()
    return Row(
        form=form,
        mode=mode,
        optimizer=how[0],
        scaling="",
        gpus=ranks.world,
        rows=rows,
        recorded=run.recorded,
        step_ms=step_ms,
        tokens_per_s=1e3 * rows * size.length / step_ms,
        optimizer_ms=optimizer_ms,
        nccl_ms=nccl_ms,
        hidden=hidden,
        peak_gb=peak,
        losses_within=within,
    )


# checkpoints


def write(form: str, folder: Path, setting: Setting) -> None:
    """Save a state of every mode, and the losses of the steps after it."""
    size, ranks, _ = setting
    for mode, how in SHARED.items():
        out, rows = place(folder, form, mode), size.weak * ranks.world
        run, checkpoints = Run(form, how, rows, setting), Checkpoints(out, ranks)
        loss = run.losses(BEFORE)[-1].item()
        checkpoints.save(run.step, step=BEFORE, loss=loss, best={}, recipe={}, rows=rows)
        losses = run.losses(AFTER).tolist()
        checkpoints.finish()
        if ranks.first:
            (out / "next.json").write_text(json.dumps(losses))
        show(ranks, f"{form} {mode}: written by {ranks.world}, next losses {listed(losses)}")


def read(form: str, folder: Path, setting: Setting) -> None:
    """Go on from the states of `write`; exits if the losses are not those that it had."""
    ranks = setting.ranks
    for mode, how in SHARED.items():
        out = place(folder, form, mode)
        checkpoints = Checkpoints(out, ranks)
        state = checkpoints.load()
        parts = max(1, state.world // ranks.world)  # as many rows at a time as the writers had
        run = Run(form, how, state.facts["rows"], setting, accumulate=parts)
        checkpoints.restore(state, run.step)
        losses, wanted = run.losses(AFTER, state.step), json.loads((out / "next.json").read_text())
        what = f"{form} {mode}: written by {state.world}, read by {ranks.world}"
        apart = largest_difference(losses, torch.tensor(wanted))
        show(ranks, f"{what}, next losses {listed(losses.tolist())}, within {apart:.1e}")
        if not apart <= RESUMED_TOLERANCE:
            raise SystemExit(
                f"{what}: losses are off by more than {RESUMED_TOLERANCE}, {listed(wanted)} wanted"
            )


def place(folder: Path, form: str, mode: str) -> Path:
    """Where a mode's states are."""
    return folder / f"{form} {mode}".replace(" ", "-")


def listed(losses: list[float]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


# the table


def tell(files: list[dict[str, Any]], log: str | None) -> None:
    """Print the table of results, and add it to a log."""
    text = table(files)
    print(f"\n{text}", flush=True)
    if log:
        with open(log, "a") as file:
            file.write(f"\n{text}\n")


def headline(about: dict[str, Any]) -> str:
    many = f"{about['gpus']} {'rank' if about['device'] == 'CPU' else 'GPU'}(s)"
    text = f"{many}: {about['date']}, {about['device']}, torch {about['torch']}"
    return f"{text}. {NO_MEASUREMENT}" if about["quick"] else text


def table(files: list[dict[str, Any]]) -> str:
    """Results at several numbers of GPUs as Markdown, against those of one where they are there."""
    files = sorted(files, key=lambda file: file["gpus"])
    kinds = {(file["device"], file["torch"], file["quick"]) for file in files}
    if len(kinds) > 1:
        raise SystemExit(f"these results cannot be compared: {sorted(kinds)}")
    rows = [Row(**row) for file in files for row in file["rows"]]
    one = {(row.form, row.optimizer, row.scaling): row for row in rows if row.gpus == 1}
    modes = [*ALONE, *SHARED]
    rows.sort(
        key=lambda row: (
            *(list(FORMS).index(row.form), SCALINGS.index(row.scaling)),
            *(modes.index(row.mode), row.gpus),
        )
    )
    texts = [columns(row, one.get((row.form, row.optimizer, row.scaling))) for row in rows]
    lines = [*dict.fromkeys(f"- {headline(file)}" for file in files), ""]
    lines += [cells(texts[0]), "|---" * len(texts[0]) + "|"]
    return "\n".join(lines + [cells(text.values()) for text in texts])


def cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def columns(row: Row, one: Row | None) -> dict[str, str]:
    """A row's texts by their heads; `one` is the row of one GPU."""
    efficiency = ratio = None
    if one is not None:
        efficiency = row.tokens_per_s / (row.gpus * one.tokens_per_s)
        ratio = row.optimizer_ms / one.optimizer_ms
    return {
        "model": row.form.upper(),
        "scaling": row.scaling,
        "mode": f"{row.mode}{' recorded' if row.recorded else ''}",
        "GPUs": str(row.gpus),
        "rows": str(row.rows),
        "step ms": f"{row.step_ms:.1f}",
        "tokens/s": f"{row.tokens_per_s:,.0f}",
        "efficiency": shown(efficiency, ".3f"),
        "optimizer ms": f"{row.optimizer_ms:.2f}",
        "of one GPU's": shown(ratio, ".3f"),
        "NCCL ms": shown(row.nccl_ms, ".1f"),
        "hidden": shown(row.hidden, ".0%"),
        "peak GB": f"{row.peak_gb:.1f}",
        "losses within": shown(row.losses_within, ".1e"),
    }


def shown(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


if __name__ == "__main__":
    sys.exit(leave_after(main))
