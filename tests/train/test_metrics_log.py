"""metrics.jsonl, and the loggers beside it: TensorBoard's real one, and a stand-in for trackio."""

import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mamba3.train.log import LOGGERS, MetricsLog, check_loggers, open_log


def test_floats_read_back_to_the_same_bits(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", last_step=0)
    loss = 0.1 + 0.2
    log.write(1, loss=loss)
    log.write(1, exact_match=1 / 3)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": loss}, {"step": 1, "exact_match": 1 / 3}]


def test_later_lines_and_broken_lines_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2, "lo')
    log = MetricsLog(path, last_step=2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    log.write(3, loss=1.0)
    assert path.read_text().endswith('{"step": 2}\n{"step": 3, "loss": 1.0}\n')


@pytest.fixture
def trackio(monkeypatch):
    """A module with trackio's functions that takes note of their calls, and fails when told to."""
    module = ModuleType("trackio")
    module.calls, module.fails = [], set()

    def function(name):
        def call(*args, **kwargs):
            module.calls.append((name, args, kwargs))
            print(f"* trackio: {name}")
            if name in module.fails:
                raise ConnectionError("the network is gone")

        return call

    for name in ("init", "log", "finish"):
        setattr(module, name, function(name))
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def opened(out, *loggers, last_step=0):
    """The log of a run with these loggers."""
    settings = {"optim": {"lr": 0.1}}
    recipe = SimpleNamespace(train=SimpleNamespace(loggers=loggers), to_dict=lambda: settings)
    return open_log(out, recipe, last_step=last_step)


def curves(out):
    """Every curve in TensorBoard's files, as {name: [(step, value)]}."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(out / "tensorboard"))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in accumulator.Scalars(name)] for name in names}


def test_tensorboard_has_the_numbers_and_a_run_that_continues_takes_later_ones_back(tmp_path):
    log = opened(tmp_path, "tensorboard")
    for step in (1, 2, 3):
        log.write(step, loss=step / 2, note="words", per_task={"copy": 0.25, "more": {"add": 1}})
    log.close()
    log = opened(tmp_path, "tensorboard", last_step=1)
    log.write(2, loss=8.0)
    log.close()
    assert curves(tmp_path) == {
        "loss": [(1, 0.5), (2, 8.0)],
        "per_task/copy": [(1, 0.25)],
        "per_task/more/add": [(1, 1.0)],
    }
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 0.5), (2, 8.0)]
    assert lines[0]["note"] == "words"


def test_trackio_has_the_numbers(tmp_path, trackio, capsys):
    out = tmp_path / "a"
    out.mkdir()
    for last_step in (0, 7):
        log = opened(out, "trackio", last_step=last_step)
        log.write(8, loss=0.5, per_task={"copy": 1}, why=None)
        log.close()
        log.close()
    settings = {"project": "mamba3", "name": "a", "config": {"optim": {"lr": 0.1}}}
    points = ("log", ({"loss": 0.5, "per_task/copy": 1.0},), {"step": 8})
    assert trackio.calls == [
        ("init", (), {**settings, "resume": "never"}), points, ("finish", (), {}),
        ("init", (), {**settings, "resume": "allow"}), points, ("finish", (), {}),
    ]  # fmt: skip
    out, err = capsys.readouterr()
    assert "init" not in out  # where the result of a command is
    assert "init" in err


def test_a_logger_that_fails_is_said_once_and_the_others_go_on(tmp_path, trackio, caplog):
    trackio.fails = {"log"}
    log = opened(tmp_path, "trackio", "tensorboard")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log.write(step, loss=float(step))
        log.close()
    [record] = caplog.records
    assert record.getMessage() == (
        "trackio failed at step 1 and gets nothing more: ConnectionError: the network is gone. "
        f"{tmp_path / 'metrics.jsonl'} has every line"
    )
    assert [name for name, _, _ in trackio.calls] == ["init", "log"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert curves(tmp_path) == {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)]}


def test_a_logger_that_fails_to_finish_is_said(tmp_path, trackio, caplog):
    trackio.fails = {"finish"}
    log = opened(tmp_path, "trackio")
    with caplog.at_level(logging.WARNING):
        log.close()
    assert "trackio failed to finish: ConnectionError: the network is gone" in caplog.text


def test_a_logger_that_does_not_start_ends_the_run_before_it_begins(tmp_path, trackio):
    trackio.fails = {"init"}
    closed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOGGERS["tensorboard"], "close", lambda self: closed.append(self))
        with pytest.raises(RuntimeError, match="trackio, which does not start: ConnectionError"):
            opened(tmp_path, "tensorboard", "trackio")
    assert len(closed) == 1
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(("name", "missing"), [("tensorboard", "torch.utils.tensorboard"),
                                               ("trackio", "trackio")])  # fmt: skip
def test_a_logger_that_is_not_installed(tmp_path, monkeypatch, name, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RuntimeError, match=f"asks for {name}, .*: python -m pip install {name}"):
        opened(tmp_path, name)


def test_an_unknown_logger(tmp_path):
    with pytest.raises(ValueError, match="some of tensorboard, trackio, got 'wandb'"):
        opened(tmp_path, "trackio", "wandb")
    with pytest.raises(ValueError, match="names one twice"):
        check_loggers(["trackio", "trackio"])


def test_other_ranks_write_nothing(tmp_path, trackio, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = opened(None, "trackio", "tensorboard")
    log.write(1, loss=1.0)
    log.close()
    assert trackio.calls == []
    assert list(tmp_path.iterdir()) == []
