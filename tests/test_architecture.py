"""The walls between packages, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A module may import from its own layer and from those below it (larger numbers).
LAYERS = {
    "scripts": 0,
    "study": 1,
    "distillation": 1,
    "cli": 2,
    "training": 2,
    "evaluation": 2,
    "memory": 2,
    "interop": 2,
    "data": 3,
    "models": 3,
    "losses": 3,
    "optim": 3,
    "sharding": 3,
    "console": 4,
    "config": 4,
    "environment": 5,
    "files": 5,
    "errors": 6,
    "output": 6,
    "signals": 6,
}
# What of the same layer a package may use besides itself.
PEERS = {
    "study": {"distillation"},
    "training": {"evaluation", "memory", "cli"},
    "evaluation": set(),
    "memory": set(),
    "cli": set(),
    "data": set(),
    "models": set(),
    "losses": set(),
    "optim": set(),
    "console": set(),
    "config": set(),
    "environment": set(),
    "files": set(),
    "errors": set(),
    "output": set(),
    "signals": set(),
}
FILES = sorted([*ROOT.glob("jaxlm/**/*.py"), *ROOT.glob("scripts/*.py")])


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "scripts" if parts[0] == "scripts" else parts[1].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    package = package_of(path)
    if package == "__init__":
        assert imports_of(path) == set()
        return
    for name in imports_of(path):
        if not name.startswith("jaxlm."):
            continue
        other = name.split(".")[1]
        if other == package:
            continue
        below = LAYERS[other] > LAYERS[package]
        assert below or other in PEERS.get(package, set()), f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("jaxlm/optim/*.py")), ids=lambda p: p.name)
def test_optim_needs_only_jax_and_optax(path):
    standard = set(sys.stdlib_module_names)
    for name in imports_of(path):
        top = name.split(".")[0]
        assert top in {"jax", "optax"} | standard or name.startswith("jaxlm.optim"), name


def test_models_know_nothing_of_files_or_devices():
    for path in ROOT.glob("jaxlm/models/*.py"):
        packages = {name.split(".")[0] for name in imports_of(path)}
        assert not packages & {"pathlib", "os", "grain", "orbax", "optax"}, path


def test_optim_runs_where_nothing_else_is_installed():
    """Block every third-party package but jax's and optax's own needs."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        blocked = {"flax", "orbax", "grain", "pydantic", "yaml", "rich", "tokenizers"}
        if name.split(".")[0] in blocked:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import jaxlm.optim
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_starts_no_backend_and_is_quick():
    code = """
import time, jax, pkgutil, importlib
began = time.perf_counter()
import jaxlm
assert time.perf_counter() - began < 0.5
for module in pkgutil.walk_packages(jaxlm.__path__, "jaxlm."):
    importlib.import_module(module.name)
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", code], check=True)
