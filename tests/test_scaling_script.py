"""The scaling benchmark on two ranks of a CPU or of GPUs, its checkpoints and its table."""

import copy
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from ranks import spawn

SCRIPTS = Path(__file__).parents[1] / "scripts"
WORLD = 2
MODES = ["ddp adamw", "allreduce adamw", "fsdp adamw", "ddp hybrid", "sharded hybrid"]
QUICK = ["--quick", "--form", "siso"]


@pytest.fixture
def script(monkeypatch):
    """The script, with a `go` that takes its arguments."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import bench_scaling

    def go(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_scaling.py", *map(str, arguments)])
        bench_scaling.main()

    monkeypatch.setattr(bench_scaling, "go", go, raising=False)
    return bench_scaling


def rank_of(rank, commands):
    """One of the processes that torchrun would start, for one command after the other."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(SCRIPTS))
    import bench_scaling

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    for port, arguments in commands:
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = ["bench_scaling.py", *map(str, arguments)]
        bench_scaling.main()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the results of two ranks, and with what they have saved."""
    folder = tmp_path_factory.mktemp("scaling")
    commands = [
        [*QUICK, "--json", folder / "2.json", "--append", folder / "log.md"],
        [*QUICK, "--write", folder / "saved"],
    ]
    commands = [(free_port(), arguments) for arguments in commands]
    spawn(rank_of, (commands,), WORLD)
    return folder


@pytest.mark.slow
def test_every_mode_is_measured_at_both_scalings(made):
    results = json.loads((made / "2.json").read_text())
    assert (results["gpus"], results["quick"]) == (WORLD, True)
    assert results["torch"] == torch.__version__
    rows = {(row["mode"], row["scaling"]): row for row in results["rows"]}
    assert list(rows) == [(mode, scaling) for mode in MODES for scaling in ("weak", "strong")]
    for (mode, scaling), row in rows.items():
        assert row["rows"] == (4 if scaling == "weak" else 8)
        assert row["optimizer"] == mode.split()[1]
        assert row["tokens_per_s"] == pytest.approx(row["rows"] * 16 / row["step_ms"] * 1e3)
        assert row["optimizer_ms"] > 0
        if scaling == "weak":
            assert row["losses_within"] < 1e-5
    log = (made / "log.md").read_text()
    assert "are no measurement" in log
    assert log.count("| SISO |") == len(rows)


@pytest.mark.slow
def test_checkpoints_resume_on_one_rank(made, script, capsys, monkeypatch):
    command = [*QUICK, "--read", made / "saved"]
    script.go(*command)
    printed = capsys.readouterr().out
    for mode in MODES:
        losses = json.loads((script.place(made / "saved", "siso", mode) / "next.json").read_text())
        assert len(losses) == 3
        first = f"{losses[0]:.6f}"[:5]
        assert f"siso {mode}: written by 2, read by 1, next losses {first}" in printed

    def weights_alone(self, state, step, restore=script.Checkpoints.restore):
        fresh = copy.deepcopy(step.optimizer.state_dict())
        restore(self, state, step)
        step.optimizer.load_state_dict(fresh)

    monkeypatch.setattr(script.Checkpoints, "restore", weights_alone)
    with pytest.raises(SystemExit, match="written by 2, read by 1: losses are off by"):
        script.go(*command)


def test_losses_that_differ_end_it(script):
    wanted = torch.tensor([4.0, 2.0])
    apart = script.largest_difference(torch.tensor([4.0, 2.001]), wanted)
    assert apart == pytest.approx(5e-4, rel=1e-3)
    rows = [{"form": "x", "mode": "y", "losses_within": within} for within in (None, apart)]
    script.check({"rows": rows})
    for losses in ([4.0, 2.003], [4.0, float("nan")]):
        far = script.largest_difference(torch.tensor(losses), wanted)
        row = {"form": "x", "mode": "z", "losses_within": far}
        with pytest.raises(SystemExit, match=r"^x z: losses are off by .*, more than 0\.001"):
            script.check({"rows": [*rows, row]})


def results_of(gpus, rows):
    """A file of results; rows are mode, scaling, tokens/s and the optimizer's milliseconds."""
    about = {"date": "2026-01-02", "device": "H200", "torch": "2.11", "gpus": gpus, "quick": False}
    rest = {"form": "siso", "gpus": gpus, "rows": 64, "recorded": gpus == 1, "step_ms": 50.25}
    rest |= {"peak_gb": 12.0, "nccl_ms": None, "hidden": None, "losses_within": None}
    if gpus > 1:
        rest |= {"nccl_ms": 8.0, "hidden": 0.75, "losses_within": 2e-5}
    names = ("mode", "scaling", "tokens_per_s", "optimizer_ms")
    made = [rest | dict(zip(names, row, strict=True)) for row in rows]
    return about | {"rows": [row | {"optimizer": row["mode"].split()[1]} for row in made]}


def test_the_table_compares_with_one_gpu(script, tmp_path, capsys):
    one, eight = tmp_path / "1.json", tmp_path / "8.json"
    rows = [
        ("one adamw", "weak", 1000.0, 2.0),
        ("one hybrid", "weak", 900.0, 6.0),
        ("one hybrid", "strong", 950.0, 6.5),
    ]
    one.write_text(json.dumps(results_of(1, rows)))
    rows = [
        ("ddp adamw", "weak", 7600.0, 2.5),
        ("ddp adamw", "strong", 7600.0, 2.5),  # one GPU has no such row
        ("sharded hybrid", "weak", 6480.0, 1.5),
        ("sharded hybrid", "strong", 5700.0, 1.3),
    ]
    eight.write_text(json.dumps(results_of(8, rows)))
    script.go("--table", eight, one)
    *about, blank, head, _ = (printed := capsys.readouterr().out.strip().split("\n"))[:5]
    assert about == [f"- {n} GPU(s): 2026-01-02, H200, torch 2.11" for n in (1, 8)]
    assert blank == ""
    names, *found = (line.strip("| ").split(" | ") for line in (head, *printed[5:]))
    found = [dict(zip(names, texts, strict=True)) for texts in found]
    looked_at = ("scaling", "mode", "GPUs", "efficiency", "of one GPU's")
    assert [tuple(row[name] for name in looked_at) for row in found] == [
        ("weak", "one adamw recorded", "1", "1.000", "1.000"),
        ("weak", "one hybrid recorded", "1", "1.000", "1.000"),
        ("weak", "ddp adamw", "8", "0.950", "1.250"),
        ("weak", "sharded hybrid", "8", "0.900", "0.250"),
        ("strong", "one hybrid recorded", "1", "1.000", "1.000"),
        ("strong", "ddp adamw", "8", "-", "-"),
        ("strong", "sharded hybrid", "8", "0.750", "0.200"),
    ]
    rest = {"model": "SISO", "rows": "64", "step ms": "50.2", "tokens/s": "7,600", "NCCL ms": "8.0"}
    rest |= {"optimizer ms": "2.50", "hidden": "75%", "peak GB": "12.0", "losses within": "2.0e-05"}
    assert found[2].items() >= rest.items()
    eight.write_text(json.dumps(json.loads(eight.read_text()) | {"torch": "2.13"}))
    with pytest.raises(SystemExit, match="these results cannot be compared"):
        script.go("--table", eight, one)


def test_a_gpu_a_rank_is_needed_to_measure(script, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(SystemExit, match=r"needs a GPU for each of 4 ranks, and found 3; --quick"):
        script.go()
