"""`import jinfer` is light, and the version is one."""

import subprocess
import sys
import tomllib
from pathlib import Path

import jinfer

ROOT = Path(__file__).resolve().parents[1]


def modules_after(statement):
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy():
    modules = modules_after("import jinfer; dir(jinfer); jinfer.__version__; jinfer.SamplingParams")
    assert "jinfer.config" in modules
    assert not modules & {"jax", "flax", "torch", "transformers", "typer", "gguf", "tokenizers", "orbax", "tensorstore"}


def test_command_line_loads_nothing_heavy():
    modules = modules_after("import jinfer.cli.main")
    assert not modules & {"jax", "flax", "gguf", "tokenizers", "jinfer.llm", "huggingface_hub"}


def test_public_names_exist():
    for name in jinfer.__all__:
        assert getattr(jinfer, name) is not None
        assert name in dir(jinfer)
    assert not hasattr(jinfer, "nothing")


def test_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == jinfer.__version__
