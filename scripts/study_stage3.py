"""Stage 3 of the curriculum: AdamW against the hybrid optimizer, and what the hybrid is made of.

    python scripts/study_stage3.py --out DIR [--init MODEL] [--jobs 12] [--steps N] [--seeds 0,1,2]
        [--lrs LR,LR,...] [--arms NAME ...] [--factors 0.5,1,2] [--set KEY=VALUE ...] [--quick]

adamw      AdamW for every parameter             anvil6     the hybrid with anvil6's polynomials
hybrid     Muon for matrices, AdamW for the      fused      the hybrid, in_proj as one matrix
           rest; polar_express5, a block of      mimo       the hybrid, layers of MIMO form
           in_proj at a time                     mamba      the hybrid, layers of Mamba-1
                                                 siso       the hybrid from random weights

AdamW and the hybrid are swept over the same learning rates with the first seed, the others over
--factors of the hybrid's best; the best of each is run with all seeds. Data, tokens, batch,
schedule and seeds are the same in all. Runs start from --init, or from random weights; mimo and
mamba always from random weights, so with --init siso is what they compare with.

Every run is a process of its own, --jobs at a time, on the GPUs in turn. DIR/runs/NAME keeps
recipe.yaml, metrics.jsonl and result.json; runs that are there are read, not repeated. DIR gets
study.json, study.md and plots. The best learning rates are chosen by exact match on the same
held-out problems that are reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from mamba3.eval.exact_match import percent
from mamba3.models.lm import Mamba3LM
from mamba3.train import load_recipe, train
from mamba3.train.plot import EVAL_LOSS, EXACT_MATCH, LOSS, plot, read_curves
from mamba3.train.readings import NotFinite

RECIPES = Path(__file__).parents[1] / "configs" / "curriculum"
LRS = "1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2"
GOAL = 0.95
WINDOW = 50  # steps that a loss is the mean of
RESULT = "result.json"


@dataclass(frozen=True)
class Arm:
    """What is compared.

    optimizer: keys of the recipe's group `optim`.
    model: changes to the architecture.
    from_scratch: whether it cannot start from the weights of --init.
    """

    optimizer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    from_scratch: bool = False


ARMS = {
    "adamw": Arm({"name": "adamw"}),
    "hybrid": Arm(),
    "anvil6": Arm({"preset": "anvil6"}),
    "fused": Arm({"split": False}),
    "siso": Arm(from_scratch=True),
    "mimo": Arm(model={"is_mimo": True}, from_scratch=True),
    "mamba": Arm(model={"layers": "mamba"}, from_scratch=True),
}
SWEPT = ("adamw", "hybrid")


@dataclass(frozen=True)
class Run:
    """One run: `mamba3 train RECIPE --set SETTINGS`."""

    arm: str
    lr: float
    seed: int
    recipe: str
    settings: tuple[str, ...]
    folder: str

    @property
    def result(self) -> dict[str, Any] | None:
        """What it came to; None if it is not done.

        Raises:
            ValueError: the folder holds another run.
        """
        path = Path(self.folder, RESULT)
        if not path.is_file():
            return None
        found = json.loads(path.read_text())
        if found["settings"] != list(self.settings):
            raise ValueError(
                f"{self.folder} holds a run with {found['settings']}, not {list(self.settings)}; "
                "choose another --out"
            )
        return found

    def make(self) -> None:
        """Train, and keep what is needed of it."""
        status, folder = "done", Path(self.folder)
        recipe = load_recipe(self.recipe, self.settings)
        began = time.perf_counter()
        try:
            train(recipe, folder, overwrite=True, progress=False)
        except (NotFinite, ValueError) as error:
            if "NaN" not in str(error) and not isinstance(error, NotFinite):
                raise
            status = str(error)
        seconds = time.perf_counter() - began
        trained = load_recipe(folder / "recipe.yaml")
        model = Mamba3LM(trained.architecture(0), device="meta")
        result = {
            "settings": list(self.settings),
            "status": status,
            "seconds": seconds,
            "parameters": sum(p.numel() for p in model.parameters()),
            **summary(folder),
        }
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in ("recipe.yaml", "metrics.jsonl", "log.txt"):
                entry.unlink()
        (folder / RESULT).write_text(json.dumps(result, indent=1))


def summary(folder: Path) -> dict[str, Any]:
    """The numbers of a run, from its metrics.jsonl; NaN where there is none."""
    curves = read_curves(folder)
    losses = curves[LOSS].values if LOSS in curves else []
    ends = [len(losses) * quarter // 4 for quarter in range(1, 5)]
    exact = list(zip(*curves.get(EXACT_MATCH, ([0], [math.nan])), strict=True))
    reached = [step for step, share in exact if share >= GOAL]
    return {
        "losses": [statistics.fmean(losses[max(0, e - WINDOW) : e] or [math.nan]) for e in ends],
        "eval_loss": curves[EVAL_LOSS].values[-1] if EVAL_LOSS in curves else math.nan,
        "exact_match": exact[-1][1],
        "best_exact_match": max(share for _, share in exact),
        "steps_to_goal": min(reached, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder of the study")
    add("--init", metavar="MODEL", help="model to start from (random weights)")
    add("--jobs", type=int, default=12, help="runs at a time (%(default)s)")
    add("--steps", type=int, default=2000, help="of every run (%(default)s)")
    add("--seeds", default="0,1,2", help="of the best (%(default)s)")
    add("--lrs", default=LRS, help="learning rates of the sweeps (%(default)s)")
    add("--factors", default="0.5,1,2", help="of the hybrid's best, for the others (%(default)s)")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="what to compare (all)")
    add("--evals", type=int, default=40, help="evaluations of a run (%(default)s)")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to all recipes")
    add("--quick", action="store_true", help="8 steps, two learning rates, one seed")
    add("--one", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        values = json.loads(args.one)
        Run(**values | {"settings": tuple(values["settings"])}).make()
        return
    if args.init is not None and Path(args.init).is_dir():
        args.init = str(Path(args.init).absolute())
    if args.quick:
        args.steps, args.seeds, args.factors = 8, "0", "1"
        args.lrs = ",".join(args.lrs.split(",")[2:4])
    Study(args).go()


class Study:
    """All runs that are asked for, and what they show."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, args.out
        self.arms = [arm for arm in args.arms if arm != "siso" or args.init is not None]
        if "hybrid" not in self.arms and set(self.arms) - {"adamw"}:
            raise SystemExit("the arms besides adamw need hybrid, whose learning rate they take")
        self.seeds = [int(seed) for seed in args.seeds.split(",")]
        self.lrs = [float(lr) for lr in args.lrs.split(",")]
        self.runs: list[Run] = []
        self.best: dict[str, float] = {}
        (self.out / "recipes").mkdir(parents=True, exist_ok=True)
        for arm in self.arms:
            path = self.out / "recipes" / f"{arm}.yaml"
            path.write_text(yaml.safe_dump(self.recipe(ARMS[arm]), sort_keys=False))

    def recipe(self, arm: Arm) -> dict[str, Any]:
        """An arm's recipe: that of stage 3, of stage 3 alone."""
        values = yaml.safe_load((RECIPES / "arithmetic.yaml").read_text())
        steps, batch_size = self.args.steps, values["data"]["batch_size"]
        values["data"] = {"stages": [3], "batch_size": batch_size, "workers": 0}
        schedule = {"warmup_steps": min(100, steps // 4), "decay_steps": steps}
        values["optim"] |= {"name": "hybrid", **schedule, **arm.optimizer}
        every = max(1, steps // self.args.evals)
        values["train"] = {"steps": steps, "save_every": steps, "eval_every": every}
        if self.args.init is not None and not arm.from_scratch:
            return values | {"train": values["train"] | {"init_from": self.args.init}}
        model = yaml.safe_load((RECIPES / "digits.yaml").read_text())["model"]
        if "layers" in arm.model:  # of the same width, state and initial steps
            sizes = ("d_state", "expand", "dt_min", "dt_max")
            of_layers = {name: model[name] for name in sizes if name in model}
            common = {name: model[name] for name in ("d_model", "n_layer", "d_intermediate")}
            return values | {"model": common | arm.model | {"mamba": of_layers}}
        return values | {"model": model | arm.model}

    def go(self) -> None:
        """Make the runs that are not there yet, and write what all of them show."""
        first, others = self.seeds[0], self.seeds[1:]
        swept = [arm for arm in SWEPT if arm in self.arms]
        rest = [arm for arm in self.arms if arm not in swept]
        began = time.perf_counter()
        self.make([self.run(arm, lr, first) for lr in self.lrs[::-1] for arm in swept])
        self.choose(swept)
        factors = [float(factor) for factor in self.args.factors.split(",")]
        self.make(
            [self.run(arm, self.best["hybrid"] * f, first) for arm in rest for f in factors]
            + [self.run(arm, self.best[arm], seed) for arm in swept for seed in others]
        )
        self.choose(rest)
        self.make([self.run(arm, self.best[arm], seed) for arm in rest for seed in others])
        self.write(time.perf_counter() - began)

    def run(self, arm: str, lr: float, seed: int) -> Run:
        """A run of this study."""
        settings = (*self.args.set, f"optim.lr={lr:.3g}", f"train.seed={seed}")
        recipe = self.out / "recipes" / f"{arm}.yaml"
        steps = load_recipe(recipe, settings).train.steps
        folder = self.out / "runs" / f"{arm}-{lr:.3g}-{seed}-{steps}"
        return Run(arm, lr, seed, str(recipe), settings, str(folder))

    def make(self, runs: list[Run]) -> None:
        """Make those that are not done, several at a time."""
        self.runs += runs
        todo = [run for run in runs if run.result is None]
        if todo:
            Pool(self.args.jobs).make(todo)

    def choose(self, arms: list[str]) -> None:
        """The best learning rate of each: exact match at the end, and then the loss, decides."""
        for arm in arms:
            done = [run for run in self.runs if run.arm == arm and run.result]
            if not done:
                raise SystemExit(f"no run of {arm} has ended: see log.txt in {self.out}/runs")
            self.best[arm] = max(done, key=lambda run: merit(run.result)).lr

    def write(self, seconds: float) -> None:
        """study.json, study.md and the plots."""
        done = [run for run in self.runs if run.result is not None]
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        content = {
            "command": " ".join(sys.argv),
            "date": time.strftime("%Y-%m-%d"),
            "device": device,
            "torch": torch.__version__,
            "seconds": seconds,
            "goal": GOAL,
            "best_lr": self.best,
            "runs": [asdict(run) | run.result for run in done],
        }
        (self.out / "study.json").write_text(json.dumps(content, indent=1))
        parts = [[self.title(device)], self.best_table(done), self.remarks(done), all_table(done)]
        text = "\n\n".join("\n".join(part) for part in parts)
        (self.out / "study.md").write_text(text + "\n")
        print(text, flush=True)
        pictures = {
            "sweeps": [run for run in done if run.arm in SWEPT and run.seed == self.seeds[0]],
            "optimizers": [run for run in done if run.arm in SWEPT and self.is_best(run)],
            "arms": [run for run in done if self.is_best(run) and run.seed == self.seeds[0]],
        }
        for name, shown in pictures.items():
            try:
                plot([run.folder for run in shown], self.out / f"{name}.png", log_loss=True)
            except RuntimeError as error:
                print(f"no plots: {error}. Run this again where it is: nothing is trained anew")
                return

    def title(self, device: str) -> str:
        """What all runs have in common."""
        recipe = load_recipe(self.out / "recipes" / f"{self.arms[0]}.yaml", self.args.set)
        return (
            f"{recipe.train.steps} steps of {recipe.data.batch_size} problems of stages "
            f"{recipe.data.stages}, from {recipe.train.init_from or 'random weights'}; measured on "
            f"{recipe.data.eval_problems} held-out problems every {recipe.train.eval_every} steps; "
            f"losses are means of {WINDOW} steps; {device}, {self.args.jobs} runs at a time"
        )

    def is_best(self, run: Run) -> bool:
        """Whether it is of its arm's best learning rate."""
        return run.lr == self.best[run.arm]

    def best_table(self, done: list[Run]) -> list[str]:
        """The best learning rate of each arm, over the seeds."""
        head = "| | parameters | lr | seeds | train loss | held-out loss | exact match | steps to "
        lines = [head + f"{GOAL:.0%} |", "|---|---|---|---|---|---|---|---|"]
        for arm in self.arms:
            found = [run.result for run in done if run.arm == arm and self.is_best(run)]
            losses = [result["losses"][-1] for result in found]
            held_out = [result["eval_loss"] for result in found]
            exact = ", ".join(percent(result["exact_match"]) for result in found)
            steps = ", ".join(str(result["steps_to_goal"] or "-") for result in found)
            lines.append(
                f"| {arm} | {found[0]['parameters']:,} | {self.best[arm]:.3g} | {len(found)} | "
                f"{statistics.fmean(losses):.4f} | {statistics.fmean(held_out):.4f} | {exact} | "
                f"{steps} |"
            )
        return lines

    def remarks(self, done: list[Run]) -> list[str]:
        """The ratio of steps to the goal; sweeps that were too narrow."""
        lines, steps = [], {}
        for arm in (arm for arm in SWEPT if arm in self.best):
            if self.best[arm] in (min(self.lrs), max(self.lrs)):
                lines.append(f"The best learning rate of {arm} is at the edge of the sweep.")
            found = [r.result["steps_to_goal"] for r in done if r.arm == arm and self.is_best(r)]
            if None in found:
                missed = sum(each is None for each in found)
                lines.append(f"{missed} of {len(found)} runs of {arm} did not reach {GOAL:.0%}.")
            else:
                steps[arm] = statistics.median(found)
        if len(steps) == len(SWEPT):
            lines.append(
                f"Median steps to {GOAL:.0%}: adamw {steps['adamw']:g}, hybrid "
                f"{steps['hybrid']:g}; adamw takes {steps['adamw'] / steps['hybrid']:.2f} times as "
                "many."
            )
        return lines


def merit(result: dict[str, Any]) -> tuple[float, float]:
    """What the best run has most of; one that ended in NaN has none."""
    if result["status"] != "done":
        return (-1.0, 0.0)
    return result["exact_match"], -result["eval_loss"]


def all_table(done: list[Run]) -> list[str]:
    """Every run."""
    lines = [
        "| run | lr | seed | loss at 1/4 | 1/2 | 3/4 | end | held-out loss | exact match | best of "
        f"all evaluations | steps to {GOAL:.0%} | seconds | ended |",
        "|" + "---|" * 13,
    ]
    for run in sorted(done, key=lambda run: (list(ARMS).index(run.arm), run.lr, run.seed)):
        found = run.result
        losses = " | ".join(f"{loss:.4f}" for loss in found["losses"])
        lines.append(
            f"| {run.arm} | {run.lr:.3g} | {run.seed} | {losses} | {found['eval_loss']:.4f} | "
            f"{percent(found['exact_match'])} | {percent(found['best_exact_match'])} | "
            f"{found['steps_to_goal'] or '-'} | {found['seconds']:.0f} | {found['status']} |"
        )
    return lines


class Pool:
    """Runs in processes of their own, so many at a time, on the GPUs in turn."""

    def __init__(self, jobs: int):
        self.jobs, self.free = jobs, queue.SimpleQueue()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [str(i) for i in range(torch.cuda.device_count())] if not gpus else gpus.split(",")
        for job in range(jobs):
            self.free.put(gpus[job % len(gpus)] if gpus else "")
        self.processes: set[subprocess.Popen] = set()
        self.lock, self.stopped = threading.Lock(), False

    def make(self, runs: list[Run]) -> None:
        """Make all of them; those that failed are told, and can be made by another call."""
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            with ThreadPoolExecutor(self.jobs) as pool:
                try:
                    for done in [pool.submit(self._make, run) for run in runs]:
                        done.result()
                except BaseException:
                    self._stop()
                    raise
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _make(self, run: Run) -> None:
        folder, gpu = Path(run.folder), self.free.get()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--out", "-", "--one", json.dumps(asdict(run))]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
        try:
            with open(folder / "log.txt", "wb") as log:
                with self.lock:
                    if self.stopped:
                        return
                    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                    self.processes.add(process)
                process.wait()
        finally:
            self.free.put(gpu)
        with self.lock:
            self.processes.discard(process)
        result = run.result
        if result is None:
            print(f"{folder.name}: failed, see {folder / 'log.txt'}", flush=True)
            return
        print(
            f"{folder.name}: loss {result['losses'][-1]:.4f}, exact match "
            f"{percent(result['exact_match'])}, {result['seconds']:.0f} s, {result['status']}",
            flush=True,
        )

    def _stop(self) -> None:
        """End the processes that go on; start no others."""
        with self.lock:
            self.stopped = True
            for process in self.processes:
                process.terminate()


if __name__ == "__main__":
    main()
