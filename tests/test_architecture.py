"""Who may import whom, and what the repository may not say. The rules are those of docs/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(path: Path) -> str:
    """`src/ops/tree.py` -> `ops`, `src/model.py` -> `model`."""
    return path.relative_to(ROOT / "src").parts[0].removesuffix(".py")


# Layer -> the layers of src that it may know. All others are free.
ALLOWED = {
    "errors": set(),
    "files": {"errors", "options"},
    "ops": {"ops"},
    "layers": {"layers", "ops"},
    "mixers": {"mixers", "layers", "ops", "registry", "options", "errors"},
    "model": {"model", "mixers", "layers", "ops", "registry", "options", "errors"},
    "pieces": {"pieces", "model", "mixers", "layers", "ops", "registry", "options", "errors"},
    "data": {"data", "registry", "options", "errors", "files"},
    "optim": {"optim", "errors"},
}
FRAMEWORKS = ("lightning", "pytorch_lightning", "torchmetrics", "tensorboard", "datasets", "omegaconf")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    here, known = layer(path), imports(path)
    inside = {name.split(".")[1] for name in known if name.startswith("src.")}
    assert not inside & {"train", "evaluate", "generate"}, "nothing imports the entry points"
    if here not in ("evaluation", "evaluate"):
        assert "evaluation" not in inside, "a model is measured once it is trained"
    if here in ALLOWED:
        assert inside <= ALLOWED[here], (
            f"{here} may import {sorted(ALLOWED[here])}, not {sorted(inside - ALLOWED[here])}"
        )
    if here in ("ops", "layers", "mixers", "model", "pieces"):
        used = sorted(name for name in known if name.split(".")[0] in FRAMEWORKS)
        assert not used, f"{here} knows no training framework, but imports {used}"
    if here == "ops":
        assert "torch.nn.Module" not in path.read_text()
        assert "nn.Module" not in path.read_text(), "operators are functions"
    assert not any(name.split(".")[0] in ("tests", "tools") for name in known)


def test_choosing_a_mixer_imports_only_that_one() -> None:
    code = (
        "import sys; from src.registry import MIXERS; MIXERS.get('softmax');"
        "print([m for m in sys.modules if m.startswith('src.mixers.') or m.split('.')[0] in ('triton', 'datasets')])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = ast.literal_eval(out.strip().splitlines()[-1])
    assert [name for name in loaded if not name.split(".")[-1].startswith("_")] == ["src.mixers.softmax"]


def test_files_can_be_read_in_one_sitting() -> None:
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 400}
    assert not long
