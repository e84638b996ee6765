"""engine/files.py: a file appears whole, in its place, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.files import check_output, write_whole


def write_text(text: str):
    return lambda part: part.write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_is_made_or_replaced(tmp_path):
    """A part left beside the file, or text behind a shorter one."""
    for text in ("first and longer", "second"):
        write_whole(tmp_path / "f", write_text(text))
        assert (tmp_path / "f").read_text() == text and names(tmp_path) == ["f"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_stood_there_stays(error, tmp_path):
    """Half a file in the place of a whole one, or a part that nobody ever removes."""
    (tmp_path / "f").write_text("old")

    def fail(part: Path) -> None:
        part.write_text("half")
        raise error

    with pytest.raises(type(error), match="f: cannot be written: No space" if error.args else None):
        write_whole(tmp_path / "f", fail)
    assert (tmp_path / "f").read_text() == "old" and names(tmp_path) == ["f"]


@pytest.mark.skipif(os.name == "nt", reason="links need a right that Windows seldom gives")
def test_through_a_link(tmp_path):
    """A link replaced by a file, and what it leads to left as it was."""
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", write_text("new"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_devices_and_pipes_are_left_alone(tmp_path):
    """A device of the machine replaced by a file, or a wait for a pipe's reader."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull), tmp_path):
        with pytest.raises(ValueError, match="not an ordinary file"):
            check_output(path)
        with pytest.raises(OSError, match="not an ordinary file"):
            write_whole(path, write_text("text"))
    assert not Path(os.devnull).is_file() and names(tmp_path) == ["pipe"]


def test_a_directory_that_is_not_there(tmp_path):
    """A name that is said to be possible, and fails after the work."""
    with pytest.raises(ValueError, match="there is no directory"):
        check_output(tmp_path / "none" / "f")
    check_output(tmp_path / "new")
