"""kv/ and scheduler/ stay plain Python: nothing in them, or behind them, imports JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jinfer.kv
import jinfer.scheduler

PACKAGES = (jinfer.kv, jinfer.scheduler)
FILES = [path for package in PACKAGES for path in sorted(Path(package.__file__).parent.glob("**/*.py"))]
BELOW = ("jinfer.config", "jinfer.errors", "jinfer.kv", "jinfer.scheduler")


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_only_the_standard_library_and_what_lies_below(path):
    for name in imports(path):
        below = any(name == package or name.startswith(package + ".") for package in BELOW)
        assert below or name.split(".")[0] in sys.stdlib_module_names, f"{path} imports {name}"


def test_all_files_are_seen():
    assert {path.name for path in FILES} >= {"pool.py", "sizing.py", "request.py", "plan.py", "scheduler.py"}


def test_a_process_that_imports_them_has_no_jax():
    code = ("import sys, jinfer.kv, jinfer.scheduler\n"
            "print([name for name in ('jax', 'jaxlib', 'flax', 'pallas_kernels') if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            cwd=Path(jinfer.__file__).parent.parent)
    assert result.stdout.strip() == "[]"
