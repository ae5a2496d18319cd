"""The house plan as a test: who may import whom, how long things may get, what importing may do."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nonet"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)

# Importable from everywhere; import only types and config themselves.
OPEN = {"types", "protocols", "config", "run", "progress"}
ANY = {"*"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "protocols": {"types"},
    "config": {"types"},
    "run": {"types", "config"},
    "progress": {"types", "config"},
    "ops": {"native"},
    "native": set(),
    "quant": {"ops", "native"},
    "model": {"ops", "native", "quant"},
    "lm": {"model", "quant", "ops", "chat"},
    "draft": {"model", "native", "quant", "ops", "lm", "chat", "engine", "tasks"},
    "convert": {"model", "quant", "chat"},
    "engine": {"model", "ops", "native"},
    "chat": set(),
    "wire": set(),
    "tasks": {"sandbox"},
    "sandbox": set(),
    "harness": {"sandbox", "chat", "wire"},
    "serve": {"wire", "chat"},
    "rl": {"ops", "quant", "model", "convert", "engine", "chat", "wire", "tasks", "sandbox", "harness"},
    "scale": {"rl", "engine"},
    "report": set(),
    "pipeline": ANY,
    "bench": ANY,
    "cli": ANY,  # inside its verbs only
    "cli_distill": ANY,  # likewise
    "cli_draft": ANY,
    "cli_runs": ANY,
}
WITHOUT_TORCH = ("chat", "wire", "serve", "tasks", "sandbox", "harness", "report", *sorted(OPEN))
# Run by path in a bare interpreter, it must put its own folder on the path: nonet/sandbox/job_server.py.
SCRIPTS = {PACKAGE / "sandbox" / "job_server.py"}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(nodes: Iterator[ast.AST], file: Path) -> Iterator[str]:
    """Dotted names of everything imported by these nodes; relative imports are resolved."""
    here = ["nonet", *file.relative_to(PACKAGE).with_suffix("").parts]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: -node.level], *filter(None, [node.module])]) if node.level else node.module or ""
            yield from (f"{base}.{a.name}" for a in node.names)


def short(file: Path) -> str:
    return str(file.relative_to(ROOT))


def rooms_imported(file: Path) -> set[str]:
    found = {name.split(".")[1] for name in imports(ast.walk(tree(file)), file) if name.startswith("nonet.")}
    return found & MAY_IMPORT.keys()


# ----------------------------------------------------------------------- who imports whom


def test_every_room_is_in_the_plan():
    found = {room(f) for f in FILES} - {"__init__"}
    assert found <= MAY_IMPORT.keys(), f"not in the table of rooms: {sorted(found - MAY_IMPORT.keys())}"


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_the_table_allows(name):
    allowed = MAY_IMPORT[name] if name in OPEN else MAY_IMPORT[name] | OPEN
    wrong = [
        f"{short(file)} imports {other}"
        for file in FILES
        if room(file) == name and "*" not in allowed
        for other in sorted(rooms_imported(file) - allowed - {name})
    ]
    assert not wrong


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_a_room_without_tensors_never_names_torch(name):
    heavy = {"torch", "transformers", "safetensors.torch"}
    wrong = [
        f"{short(file)} imports {other}"
        for file in FILES
        if room(file) == name
        for other in imports(ast.walk(tree(file)), file)
        if other in heavy or other.split(".")[0] in heavy
    ]
    assert not wrong


def test_rooms_without_tensors_load_without_torch():
    """Not even through somebody else."""
    names = [m for m in map(module, FILES) if m.split(".")[1:2] and m.split(".")[1] in WITHOUT_TORCH]
    names = [m for m in names if m != module(next(iter(SCRIPTS)))]
    code = f"import importlib, sys\nfor m in {names!r}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    assert python("-c", code).strip() == "False"


def test_the_open_modules_import_only_each_other():
    for name in OPEN:
        assert rooms_imported(PACKAGE / f"{name}.py") <= {"types", "config"}


# ---------------------------------------------------------------------------- the command


VERBS = (PACKAGE / "cli.py", PACKAGE / "cli_distill.py", PACKAGE / "cli_draft.py", PACKAGE / "cli_runs.py")


@pytest.mark.parametrize("cli", VERBS, ids=short)
def test_cli_imports_its_rooms_inside_the_verbs(cli):
    ours = {name.split(".")[1] for name in imports(iter(tree(cli).body), cli) if name.startswith("nonet.")}
    assert ours <= OPEN | {"cli_distill", "cli_draft", "cli_runs"}


@pytest.mark.parametrize("cli", VERBS, ids=short)
def test_every_module_that_a_verb_loads_exists(cli):
    names = {n.module for n in ast.walk(tree(cli)) if isinstance(n, ast.ImportFrom) and n.module}
    assert not [n for n in sorted(names) if n.startswith("nonet") and find_spec(n) is None]


def test_help_of_every_verb_loads_no_torch():
    code = """
import sys
from typer.testing import CliRunner
from nonet.cli import app
runner = CliRunner()
verbs = [c.name or c.callback.__name__ for c in app.registered_commands]
verbs += [g.typer_instance.info.name for g in app.registered_groups]
for arguments in [["--help"], *([v, "--help"] for v in verbs)]:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output
print(len(verbs), sorted({"torch", "numpy", "pydantic", "tokenizers", "matplotlib"} & sys.modules.keys()))
"""
    verbs, loaded = python("-c", code).split(" ", 1)
    assert int(verbs) >= 5
    assert "torch" not in loaded


def test_help_answers_in_half_a_second():
    pressure = Path("/proc/pressure/cpu")
    busy = re.search(r"avg10=([\d.]+)", pressure.read_text()) if pressure.exists() else None
    if busy and float(busy[1]) > 20:
        pytest.skip(f"other work takes the processors (pressure {busy[1]}%)")
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        assert "Usage" in python("-m", "nonet.cli", "--help")
        seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[1] < 0.5


# ---------------------------------------------------------------------------- how long, how named


@pytest.mark.parametrize("file", FILES, ids=short)
def test_files_and_functions_stay_short(file):
    assert len(file.read_text().splitlines()) <= 400
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


def test_no_two_test_files_share_a_name():
    """pytest imports them by it, and would refuse the second."""
    names = [p.name for p in (ROOT / "tests").rglob("*.py") if p.name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))


def test_no_module_is_a_drawer():
    banned = {"utils", "util", "common", "helpers", "helper", "misc", "base", "core", "stuff"}
    assert not [short(f) for f in FILES if f.stem in banned or f.parent.name in banned]


# ---------------------------------------------------------------------------- what importing does

HARMLESS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_guard(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` and `if __name__ == "__main__":` do nothing on import."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")


@pytest.mark.parametrize("file", [f for f in FILES if f not in SCRIPTS], ids=short)
def test_importing_only_defines_things(file):
    """No calls at module level but those whose result is given a name (constants, tables, the typer app)."""
    wrong = [
        f"line {node.lineno}: {ast.unparse(node)[:60]}"
        for node in tree(file).body
        if not isinstance(node, HARMLESS) and not is_docstring(node) and not is_guard(node)
    ]
    assert not wrong


def test_importing_everything_prints_nothing_and_leaves_the_process_as_it_was(tmp_path):
    names = [module(f) for f in FILES if f not in SCRIPTS and module(f) not in ("nonet.cli",)]
    code = f"""
import importlib, os, threading
import numpy, torch
before = os.environ.copy(), torch.get_num_threads(), torch.get_default_dtype(), os.getcwd()
seed, threads = torch.random.get_rng_state(), threading.active_count()
for name in {names!r}:
    importlib.import_module(name)
after = os.environ.copy(), torch.get_num_threads(), torch.get_default_dtype(), os.getcwd()
assert before == after
assert torch.equal(seed, torch.random.get_rng_state())
assert threads == threading.active_count()
"""
    assert python("-W", "error::SyntaxWarning", "-c", code, cwd=tmp_path) == ""
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------- what is written in sources


def sources() -> Iterator[Path]:
    """Text files that are ours: everything but what .gitignore names and what tools leave."""
    ignored = {"models", "runs", "dist", "build", "__pycache__"}
    for folder, folders, names in os.walk(ROOT):
        kept = (f for f in folders if f == ".ci" or not (f.startswith(".") or f in ignored or f.endswith(".egg-info")))
        folders[:] = sorted(kept)
        yield from (Path(folder, name) for name in sorted(names))


def test_no_source_names_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.])/(work|home|root|Users|mnt|data)/(?!someone)\w")
    wrong = []
    for file in sources():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        wrong += [f"{short(file)}: {m[0]}" for m in pattern.finditer(text)]
    assert not wrong


@pytest.mark.parametrize("file", FILES, ids=short)
def test_nothing_is_left_for_later(file):
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK|raise NotImplementedError)\b", file.read_text())


def test_every_file_says_what_it_is():
    silent = [short(f) for f in FILES if f.stat().st_size and not ast.get_docstring(tree(f))]
    assert not silent


# ---------------------------------------------------------------------------- small things


def module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python(*arguments: str, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout
