"""Tables that scripts write into a text between two marks: <!-- name --> ... <!-- /name -->"""

from __future__ import annotations

from pathlib import Path


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def is_marked(file: Path, name: str) -> bool:
    """Whether `file` has a place for the table `name`."""
    start, end = marks(name)
    _, found, rest = file.read_text(encoding="utf-8").partition(start)
    return bool(found) and end in rest


def write(file: Path, name: str, table: str) -> None:
    """Put `table` between its marks in `file`."""
    start, end = marks(name)
    before, _, rest = file.read_text(encoding="utf-8").partition(start)
    after = rest.partition(end)[2]
    file.write_text(f"{before}{start}\n{table}\n{end}{after}", encoding="utf-8")
