"""The profile of steps: its arithmetic on made-up events, and a real one."""

import json

import pytest

from mamba3.cli import main
from mamba3.train.profile import busy_share, longest, parts_of, profile


def event(kind, name, start, stop):
    return {"cat": kind, "name": name, "ts": 1000 * start, "dur": 1000 * (stop - start)}


EVENTS = [
    event("user_annotation", "data", 0, 1),
    event("user_annotation", "forward", 1, 5),
    event("user_annotation", "forward", 10, 14),
    event("user_annotation", "something else", 0, 100),
    event("gpu_user_annotation", "forward", 2, 8),
    event("kernel", "mm", 2, 4),
    event("kernel", "mm", 3, 6),
    event("kernel", "add", 10, 12),
    event("cpu_op", "aten::mm", 1, 3),
    {"ph": "M", "name": "process_name"},
]


def test_the_arithmetic():
    assert parts_of(EVENTS, 2, True) == {"data": (0.5, 0.0), "forward": (4.0, 3.0)}
    assert parts_of(EVENTS, 1, False) == {"data": (1.0, None), "forward": (8.0, None)}
    assert busy_share(EVENTS) == pytest.approx(6 / 10)
    assert busy_share([]) == 0
    assert longest(EVENTS, "kernel", 2) == [("mm", 2.5, 1.0), ("add", 1.0, 0.5)]


def test_a_profile_accounts_for_a_step(make_recipe, tmp_path):
    recipe = make_recipe({"data.batch_size": 64, "step.accumulate": 2})
    found = profile(recipe, tmp_path / "p", steps=4)
    assert list(found.parts) == ["data", "forward", "backward", "clipping", "optimizer"]
    spent = sum(part.host_ms for part in found.parts.values())
    # What is profiled is slower than what is not, and little is outside of the parts.
    assert 0.5 * found.eager_ms < spent < 20 * found.eager_ms
    assert found.parts["backward"].host_ms > found.parts["clipping"].host_ms
    assert all(milliseconds > 0 for _, milliseconds, _ in found.kernels)
    events = json.loads((tmp_path / "p" / "trace.json").read_text())["traceEvents"]
    marks = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    assert marks.count("forward") == marks.count("backward") == 8
    assert marks.count("optimizer") == 4
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        profile(recipe, tmp_path / "p", steps=0)


def test_the_command(make_recipe, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(make_recipe().to_yaml())
    command = ["profile", str(path), "--out", str(tmp_path / "p"), "--steps", "2"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["parts"]["forward"]["host_ms"] > 0
    assert main([*command, "--set", "data.batch_size=4"]) == 0
    printed = capsys.readouterr().out
    assert f"the trace is in {tmp_path / 'p' / 'trace.json'}" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["part", "host", "ms", "GPU", "ms"] in rows
    assert [row[0] for row in rows if row and row[-1] == "-"] == list(found["parts"])
