"""Imports point only downward. Nothing is imported here: the sources are read."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import medusa_train

PACKAGE = Path(medusa_train.__file__).parent

# A part may import parts on lines above its own; those on one line never import each other
ORDER = (
    ("ops", "errors"),
    ("config", "parallel"),
    ("track",),
    ("model",),
    ("data", "decode"),
    ("distill", "train", "evaluate"),
    ("layout",),
    ("actions", "chat"),
    ("pipeline",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}

# Where else these libraries are allowed than in files named here, they would spread
AT_HOME = {
    "deepspeed": {"parallel.py", "train/deepspeed_engine.py", "train/deepspeed_package.py"},
    "hydra": {"__main__.py", "config/load.py"},
    "omegaconf": {"__main__.py", "config/load.py"},
    "wandb": {"track/sinks.py"},
    "matplotlib": {"evaluate/plots.py"},
    "peft": {"model/student.py"},
    "datasets": set(),
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a source file imports anywhere, by name or by `import_module`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.ImportFrom():
                yield "a relative import"
            case ast.Call(args=[ast.Constant(value=str(module)), *_]) if ast.unparse(
                node.func
            ).endswith("import_module"):
                yield module


def top_level_imports(path: Path) -> Iterator[str]:
    """Modules imported as soon as the file itself is."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_part_has_its_place():
    parts = {part_of(path) for path in sources()} - {"__init__"}

    assert parts == set(LEVEL)


def test_imports_point_only_downward():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in sources()
        for module in imports(path)
        if module.startswith("medusa_train.")
        and module.split(".")[1] != part_of(path)
        and LEVEL[module.split(".")[1]] >= LEVEL[part_of(path)]
    ]

    assert wrong == []


def test_imports_within_the_package_are_absolute_and_name_a_part():
    named = {path.relative_to(PACKAGE).as_posix(): set(imports(path)) for path in sources()}

    assert [f for f, found in named.items() if found & {"medusa_train", "a relative import"}] == []


def test_the_lowest_layer_needs_torch_alone():
    allowed = {"torch", "medusa_train", *sys.stdlib_module_names}
    found = {
        module.split(".")[0] for path in (PACKAGE / "ops").glob("*.py") for module in imports(path)
    }

    assert found - allowed == set()


def test_the_loop_knows_neither_launcher_nor_settings_reader_nor_tracker():
    found = {module.split(".")[0] for module in imports(PACKAGE / "train" / "loop.py")}

    assert found & {"deepspeed", "hydra", "omegaconf", "wandb", "transformers"} == set()


def test_libraries_stay_where_they_are_at_home():
    found = {library: set() for library in AT_HOME}
    for path in sources():
        for module in imports(path):
            library = module.split(".")[0]
            if library in found:
                found[library].add(path.relative_to(PACKAGE).as_posix())

    assert {library: files - AT_HOME[library] for library, files in found.items()} == {
        library: set() for library in AT_HOME
    }


def test_settings_are_checked_without_torch():
    """What the command line imports at its top must be quick to import."""
    slow = {"torch", "transformers", "deepspeed", "wandb", "matplotlib", "pyarrow"}
    early = ["__main__.py", "errors.py", "track/console.py", "track/__init__.py"]
    early += [path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "config").glob("*.py")]
    found = {name: {m.split(".")[0] for m in top_level_imports(PACKAGE / name)} for name in early}

    assert {name: modules & slow for name, modules in found.items() if modules & slow} == {}
