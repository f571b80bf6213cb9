"""Curves of runs: what is read from their files, and what the figure's lines hold."""

import argparse
import json
import logging
import math
import statistics
import sys

import pytest

from mamba3.commands import plot as command
from mamba3.train.plot import COLOURS, Curve, draw, names_of, plot, read_curves, running_median


def write(folder, lines, tail=""):
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def drawn(figure):
    """What the lines of every panel hold, as {title: {label: (steps, values)}}."""
    return {
        panel.get_title(): {
            line.get_label(): tuple(map(list, line.get_data())) for line in panel.lines
        }
        for panel in figure.axes
    }


def test_the_figure_holds_the_runs_numbers(tmp_path):
    a = [{"step": i, "loss": 3 / i, "lr": 0.1 * i, "tokens_per_s": 100.0 * i} for i in (1, 2, 3)]
    a.insert(2, {"step": 2, "exact_match": 0.25, "n": 8})
    a.append({"step": 3, "exact_match": 0.5})
    b = [{"step": 5, "loss": 2.0, "lr": 0.3, "tokens_per_s": 7.0}]
    runs = {
        name: read_curves(write(tmp_path / name, lines)) for name, lines in {"a": a, "b": b}.items()
    }
    figure = draw(runs)
    assert drawn(figure) == {
        "loss": {"a": ([1, 2, 3], [3.0, 1.5, 1.0]), "b": ([5], [2.0])},
        "exact match": {"a": ([2, 3], [0.25, 0.5])},
        "learning rate": {"a": ([1, 2, 3], [0.1, 0.2, pytest.approx(0.3)]), "b": ([5], [0.3])},
        "tokens/s": {"a": ([1, 2, 3], [100.0, 200.0, 300.0]), "b": ([5], [7.0])},
    }
    [legend] = figure.legends
    assert [text.get_text() for text in legend.texts] == ["a", "b"]
    colours = [handle.get_color() for handle in legend.legend_handles]
    assert colours == list(COLOURS[:2])
    for panel in figure.axes:
        assert panel.get_xlabel() == "step"
        for line in panel.lines:
            assert line.get_color() == colours["ab".index(line.get_label())]
    assert figure.axes[0].get_yscale() == "linear"
    assert draw(runs, log_loss=True).axes[0].get_yscale() == "log"


def test_a_long_run_is_smoothed_and_its_evaluations_are_dots():
    losses = [float((7 * i) % 13) for i in range(200)]  # 2 % of it is a window of 5
    curves = {
        "loss": Curve(list(range(1, 201)), losses),
        "eval_loss": Curve([100, 200], [2.0, 1.0]),
    }
    figure = draw({"run": curves})
    raw, smooth, evaluation = figure.axes[0].lines
    assert figure.axes[0].get_title() == "loss (dots: evaluation)"
    assert list(raw.get_ydata()) == losses
    assert raw.get_alpha() < 0.5
    expected = [statistics.median(losses[max(i - 2, 0) : i + 3]) for i in range(200)]
    assert list(smooth.get_ydata()) == expected
    assert tuple(map(list, evaluation.get_data())) == ([100, 200], [2.0, 1.0])
    assert evaluation.get_marker() == "o"
    assert len(figure.legends[0].texts) == 1  # what is behind a curve is no run of its own


def test_more_runs_than_colours_look_different():
    runs = {str(i): {"lr": Curve([1], [1.0])} for i in range(2 * len(COLOURS) + 1)}
    looks = {(line.get_color(), line.get_linestyle()) for line in draw(runs).axes[2].lines}
    assert len(looks) == len(runs)


def test_the_running_median_by_hand():
    assert running_median([5, 1, 4, 2, 3], 3) == [3, 4, 2, 3, 2.5]
    assert running_median([5, 1, 4], 0) == [5, 1, 4]
    assert running_median([], 3) == []
    got = running_median([1.0, math.nan, math.inf, math.nan, 4.0, 6.0], 3)
    assert got[:2] == [1.0, 1.0]
    assert math.isnan(got[2])
    assert got[3:] == [4.0, 5.0, 5.0]
    assert running_median([1.0, 2.0], 99) == [1.5, 1.5]


def test_damaged_lines_are_left_out(tmp_path, caplog):
    lines = [{"step": i, "loss": float(i)} for i in (1, 2)]
    with caplog.at_level(logging.WARNING):
        cut_off = read_curves(write(tmp_path / "a", lines, tail='{"step": 3, "loss": 0.'))
        assert caplog.text == ""  # as of any run that was killed, or is under way
        whole = read_curves(write(tmp_path / "b", lines, tail='{"step": 3, "loss": NaN}'))
        worse = read_curves(write(tmp_path / "c", lines[:1], tail='[]\n{"st\n{"loss": 5}\n'))
    assert cut_off == {"loss": Curve([1, 2], [1.0, 2.0])}
    assert whole["loss"].steps == [1, 2, 3]
    assert math.isnan(whole["loss"].values[2])
    assert worse == {"loss": Curve([1], [1.0])}
    [record] = caplog.records
    assert f"3 lines of {tmp_path / 'c' / 'metrics.jsonl'} are damaged" in record.getMessage()


def test_steps_that_were_made_once_more_replace_the_first_ones(tmp_path):
    lines = [{"step": i, "loss": float(i)} for i in (1, 2, 3, 4)]
    lines += [{"step": i, "loss": -float(i)} for i in (3, 4)]
    curves = read_curves(write(tmp_path / "a", lines))
    assert curves["loss"] == Curve([1, 2, 3, 4], [1.0, 2.0, -3.0, -4.0])


def test_names_tell_runs_apart(tmp_path):
    parts = [("x", "a"), ("x", "b")], [("x", "a"), ("y", "a")], [("x", "y", "a"), ("z", "y", "a")]
    names = [names_of([tmp_path.joinpath(*one) for one in those]) for those in parts]
    assert names == [["a", "b"], ["x/a", "y/a"], ["x/y/a", "z/y/a"]]


def test_what_cannot_be_drawn_is_said(tmp_path, monkeypatch):
    out = tmp_path / "plot.png"
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none: expected one"):
        plot([tmp_path / "none"], out)
    with pytest.raises(FileNotFoundError, match=r"has no metrics\.jsonl: it is no run's folder"):
        plot([tmp_path], out)
    empty = write(tmp_path / "empty", [])
    with pytest.raises(ValueError, match="nothing to draw: no run has made a step"):
        plot([empty], out)
    run = write(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    with pytest.raises(ValueError, match="docx"):
        plot([run], tmp_path / "plot.docx")
    assert not list(tmp_path.glob("*plot.*"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="python -m pip install matplotlib"):
        plot([run], out)


def test_the_command(tmp_path, capsys, monkeypatch):
    """In the formats that endings ask for; a folder that is there twice has one curve."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("one", "two")):
        write(tmp_path / "runs" / name, [{"step": 1, "loss": 1.0 + i}])
    figures = []

    def keep(*args, **options):
        figures.append((draw(*args, **options), options))
        return figures[-1][0]

    monkeypatch.setattr("mamba3.train.plot.draw", keep)
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    starts = {"new/plot.png": b"\x89PNG", "plot.svg": b"<?xml", "plot": b"\x89PNG"}
    for name, start in starts.items():
        args = parser.parse_args(["plot", "runs/one", "runs/two", "runs/one/", "--out", name])
        args.run(args)
        assert (tmp_path / name).read_bytes().startswith(start)
        assert capsys.readouterr().out == f"saved to {name}\n"
    figure, options = figures[0]
    assert drawn(figure)["loss"] == {"one": ([1], [1.0]), "two": ([1], [2.0])}
    assert options == {"log_loss": False}
    args = parser.parse_args(["plot", "runs/one", "--out", "log.png", "--log-loss"])
    args.run(args)
    assert figures[-1][1] == {"log_loss": True}
