"""How the house stands: imports that run one way, files of one concern, and what may lie where."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
from pathlib import Path

import pytest

import engine

PACKAGE = Path(engine.__file__).parent
REPO = Path(__file__).resolve().parent.parent
CHECKOUT = (REPO / "pyproject.toml").exists() and PACKAGE == REPO / "engine"

MAX_LINES = 350
MAX_NOTEBOOK_FUNCTION = 10
TOP = {"pyproject.toml", "engine", "tests", "benchmarks", "notebooks", "README.md", "LICENSE"}


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in FILES.items()}


def imported(name: str) -> set[str]:
    """The modules of the engine that module `name` imports, wherever in it.

    `from engine import memory` is of engine.memory; `from engine import LLM`, of engine itself.
    """
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import, in line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in FILES else node.module)
    return {module for module in found if module.split(".")[0] == "engine"}


def within(module: str, *packages: str) -> bool:
    return any(f"{module}.".startswith(f"engine.{package}.") for package in packages)


def arrows(*packages: str) -> list[tuple[str, str]]:
    """(importing module, imported module), from the modules of some packages of the engine."""
    return [
        (name, to) for name in FILES if within(name, *packages) for to in sorted(imported(name))
    ]


def test_the_files_are_found():
    """An empty list of files, with which all else here would pass."""
    for name in ("engine", "engine.model", "engine.cache", "engine.kernels.simd"):
        assert name in FILES
    assert "engine.kernels.simd" in imported("engine.kernels.matmul")
    assert "engine.memory" in imported("engine.model")


# ---------------------------------------------------------------- imports


def test_kernels_import_only_kernels():
    """A kernel that knows of models, files or requests."""
    assert [arrow for arrow in arrows("kernels") if not within(arrow[1], "kernels")] == []


def test_loading_knows_no_model():
    """Loading that builds, runs or asks a model."""
    above = ("llm", "generate", "run", "model", "reference", "serve")
    assert [arrow for arrow in arrows("loading") if within(arrow[1], *above)] == []


def test_caches_know_no_model():
    """A cache that fits one model only."""
    above = ("llm", "generate", "run", "model", "reference", "serve", "loading", "config")
    assert [arrow for arrow in arrows("cache") if within(arrow[1], *above)] == []


def test_only_the_server_needs_the_servers_packages():
    """An engine, or a batch, that cannot be run where only the core is installed."""
    extra = {"fastapi", "starlette", "uvicorn", "prometheus_client"}
    needing = set()
    for name, tree in TREES.items():
        modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        if not extra.isdisjoint(module.split(".")[0] for module in modules):
            needing.add(name)
    for _ in FILES:
        needing |= {name for name in FILES if not needing.isdisjoint(imported(name))}
    assert "engine.serve.server" in needing
    assert [name for name in needing if not within(name, "serve")] == []


def test_no_ring_of_imports():
    """Modules that cannot be read, or imported, one without the other."""
    reached = {name: imported(name) for name in FILES}
    for _ in FILES:  # until nothing is added: far fewer rounds
        for found in reached.values():
            found |= set().union(*(reached[to] for to in found))
    assert [name for name, found in reached.items() if name in found] == []


@pytest.mark.parametrize("name", ["engine.run", "engine.batch", "engine.serve.__main__"])
def test_commands_take_ctrl_c_first(name):
    """Ctrl-C in the second that libraries take to be imported prints a traceback of them."""
    before = set()
    for node in TREES[name].body:
        match node:
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                break
            case ast.Import(names=names):
                before |= {alias.name for alias in names}
            case ast.ImportFrom(module=module):
                before.add(module)
    assert before == {"__future__", "signal", "sys"}


def test_no_import_inside_a_function():
    """A ring bridged where a reader does not look; these alone wait with a library until asked."""
    late = ("engine.loading.hub", "engine.grammar", "engine.run")
    found = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                inside = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
                found += [f"{name}:{n.lineno}" for n in inside if name not in late]
    assert found == []


# ---------------------------------------------------------------- code


def test_no_numba_trap():
    """prange and parallel=True (abort when two threads meet in them), jitclass (never cached),
    fastmath=True (isinf and isnan become false)."""
    found = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Name(id="prange" | "jitclass")
                    | ast.Attribute(attr="prange" | "jitclass")
                    | ast.alias(name="prange" | "jitclass")
                ):
                    found.append(f"{name}:{node.lineno}")
                case ast.keyword(arg="parallel" | "fastmath", value=ast.Constant(value=True)):
                    found.append(f"{name}:{node.value.lineno}")
                case ast.Dict(keys=keys, values=values):
                    for key, value in zip(keys, values, strict=True):
                        match key, value:
                            case (
                                ast.Constant(value="parallel" | "fastmath"),
                                ast.Constant(value=True),
                            ):
                                found.append(f"{name}:{key.lineno}")
    assert found == []


def test_a_file_is_one_concern():
    """A file that has grown to two concerns."""
    lines = {
        name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in FILES.items()
    }
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_docstrings():
    """A module that does not say what it is for; a kernel without its formula and shapes."""
    silent = [name for name, tree in TREES.items() if tree.body and not ast.get_docstring(tree)]
    for name, tree in TREES.items():
        for node in tree.body:
            match node:
                case ast.FunctionDef(decorator_list=[ast.Name(id="kernel")]):
                    silent += [] if ast.get_docstring(node) else [f"{name}:{node.lineno}"]
    assert silent == []


# ---------------------------------------------------------------- the repository


@pytest.mark.skipif(not CHECKOUT, reason="needs the repository")
def test_top_level():
    """Notes, scripts and results left lying where a reader comes in."""
    lines = (REPO / ".gitignore").read_text().splitlines()
    ignored = [line.strip("/") for line in lines if line and not line.startswith("#")]
    strange = [
        entry.name
        for entry in REPO.iterdir()
        if entry.name not in TOP
        and not entry.name.startswith(".")
        and not any(fnmatch.fnmatch(entry.name, pattern) for pattern in ignored)
    ]
    assert strange == []


@pytest.mark.skipif(not CHECKOUT, reason="needs the repository")
def test_the_readme_names_every_file():
    """A tree in which a reader does not find a file, or finds one that has gone."""
    tree = (
        (REPO / "README.md").read_text(encoding="utf-8").split("```\nengine/\n")[1].split("```")[0]
    )
    shown = sorted(re.findall(r"[a-z_0-9]+\.(?:py|html)", tree))
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html")]
    assert shown == sorted(file.name for file in files if file.name != "__init__.py")


def cells(notebook: Path) -> list[str]:
    """The code cells' text, without lines that only IPython reads."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    keep = [[line for line in text.splitlines() if line[:1] not in ("%", "!")] for text in code]
    return ["\n".join(lines) for lines in keep]


@pytest.mark.skipif(not CHECKOUT, reason="needs the repository")
@pytest.mark.parametrize(
    "notebook", sorted((REPO / "notebooks").glob("*.ipynb")), ids=lambda notebook: notebook.name
)
def test_notebooks_hold_no_logic(notebook):
    """A part of the engine that lives in a notebook, where no test sees it."""
    for text in cells(notebook):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MAX_NOTEBOOK_FUNCTION, f"{node.name}: {lines} lines"
