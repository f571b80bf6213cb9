"""The README's code blocks and commands, run in order in one folder as they stand.

A block of text after another block is what that one prints.
"""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = {
    "python -m pip install torch==2.13.0 -e . && mamba3 quickstart",
    "python -m pip install torch==2.13.0 -e '.[dev]' && python -m pytest",
}


class Block(NamedTuple):
    language: str
    code: str
    line: int


BLOCKS = [
    Block(match[1], match[2], README[: match.start()].count("\n") + 1)
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
]
COMMANDS = [
    (block.line, line)
    for block in BLOCKS
    if block.language == "bash"
    for line in block.code.splitlines()
]
RUN = [
    (block, following.code if following and following.language == "text" else None)
    for block, following in zip(BLOCKS, [*BLOCKS[1:], None], strict=True)
    if block.language != "text"
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory, shell_in):
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    return shell_in(folder)


def test_every_block_is_of_a_kind_that_is_run():
    assert README.count("```") == 2 * len(BLOCKS)
    assert {block.language for block in BLOCKS} == {"bash", "python", "text"}


def test_install_commands():
    """The two that install; what they run after it is run by `quickstart`, and is this run."""
    assert {line for _, line in COMMANDS if "pip install" in line} == INSTALL


def test_quickstart_runs(quickstart):
    assert quickstart.done.returncode == 0, quickstart.done.stderr


def test_blocks(shell):
    """All of them in one test, since blocks use what those before them have made."""
    for block, printed in RUN:
        where = f"README.md, line {block.line}"
        if block.language == "python":
            done = shell(f"python -W error -c {shlex.quote(block.code)}")
        else:
            lines = [line for line in block.code.splitlines() if line not in INSTALL]
            assert all(
                line.startswith(("mamba3 ", "python scripts/", "printf ")) for line in lines
            ), where
            lines = [f"{line} --quick" if "scripts/" in line else line for line in lines]
            done = shell("\n".join(lines))
        assert done.returncode == 0, f"{where}:\n{done.stderr}"
        if printed is not None:
            assert done.stdout == printed, where


def test_every_command_is_shown():
    shown = {line.split()[1] for _, line in COMMANDS if line.startswith("mamba3 ")}
    table = set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
    assert table == shown | {"quickstart"}


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_names_in_the_tables_exist():
    for name in re.findall(r"`(mamba3\.[\w.]+)`", README):
        if not is_module(name):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name
    assert not re.search(r"\bTODO\b|\bTBD\b", README)
