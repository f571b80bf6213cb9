import json

from mamba3.train.log import MetricsLog


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
