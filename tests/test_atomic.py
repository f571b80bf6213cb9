import errno

import pytest

from mamba3.atomic import replace_file, replace_text


def test_replace(tmp_path):
    replace_text(tmp_path / "a", "old")
    replace_text(tmp_path / "a", "néw\n")
    assert (tmp_path / "a").read_bytes() == "néw\n".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path):
    replace_text(tmp_path / "a", "old")

    def write(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "a", write)
    assert (tmp_path / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_others_may_read_the_file(tmp_path):
    (tmp_path / "plain").write_text("x")
    replace_text(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode
