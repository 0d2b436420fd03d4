"""Imports: where they stand, and how much they load. The direction is held by import-linter (see pyproject.toml)."""

import ast
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import selfmask

ROOT = Path(selfmask.__file__).parent
LATE = {  # what may be imported inside a function: extras, plotting, the hub, and data sets that are fetched
    "hub.card",
    "hub.transfer",
    "open_clip",
    "peft",
    "pyarrow",
    "pyarrow.parquet",
    "pyarrow.fs",
    "fsspec",
    "fsspec.implementations.arrow",
    "aiohttp",
    "datasets",
    "submitit",
    "submitit.helpers",
    "ray",
    "ray.exceptions",
    "onnxruntime",
    "faiss",
    "mixed_view",  # which needs numba
    "pillow_heif",
    "av",
    "matplotlib.figure",
    "torchvision.datasets",
    "report.page",
    "report.examples",
    "report.figures",
    "report.curation",
    "outcome",
}
COMPILER = {"torch._dynamo", "torchvision"}  # torch's compiler, which takes about as long as torch, and who loads it


def late_imports(file: Path) -> list[str]:
    """The modules that a file imports inside functions."""
    found: list[str] = []
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    found.append(node.module or ".")
                elif isinstance(node, ast.Import):
                    found += [alias.name for alias in node.names]
    return found


def test_imports_stand_at_the_top() -> None:
    files = [file for file in ROOT.rglob("*.py") if file.relative_to(ROOT).parts[0] != "cli"]
    assert len(files) > 100
    found = {str(file.relative_to(ROOT)): set(late_imports(file)) - LATE for file in files}
    assert {file: late for file, late in found.items() if late} == {}


def loaded_by(module: str) -> list[str]:
    code = f"import sys, json, {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules: list[str] = json.loads(done.stdout)
    return modules


@pytest.mark.parametrize(
    ("module", "most", "without"),
    [
        ("selfmask", 2, {"torch", "numpy", "rich", "typer"}),
        pytest.param(
            "selfmask.masking",
            37,
            {*COMPILER, "timm", "PIL", "accelerate", "huggingface_hub", "rich", "selfmask.data"},
            marks=pytest.mark.heavy,
        ),
        (
            "selfmask.commands.adapt",
            132,
            {*COMPILER, "timm", "sklearn", "matplotlib", "peft", "transformers", "selfmask.cascade"},
        ),
    ],
)
def test_imports_stay_light(module: str, most: int, without: set[str]) -> None:
    modules = loaded_by(module)
    assert len([name for name in modules if name.partition(".")[0] == "selfmask"]) <= most
    assert not without & set(modules)


def seconds_of(code: str) -> float:
    """CPU seconds of a process that runs `code`, the lesser of two: a busy machine disturbs these less than a clock."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(2):
        before = spent()
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        seconds.append(spent() - before)
    return min(seconds)


@pytest.mark.heavy
def test_import_and_help_cost_little_beside_torch() -> None:
    helping = "import sys; sys.argv = ['selfmask', '--help']; from selfmask.cli import main; main()"
    torch = seconds_of("import torch")
    assert seconds_of("import selfmask") < 0.15 * torch
    assert seconds_of(helping) < 0.3 * torch


@pytest.mark.heavy
def test_the_help_of_a_command_does_not_cost_a_compiler() -> None:
    """It lists the settings of everything, so torch is loaded, but not its compiler: with that, it was 2.5 times."""
    helping = "import sys; sys.argv = ['selfmask', 'adapt', '--help']; from selfmask.cli import main; main()"
    assert seconds_of(helping) < 2.2 * seconds_of("import torch")
