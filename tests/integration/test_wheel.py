"""The wheel, installed where the checkout cannot be seen, runs from another folder."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from command_case import manifest, run_command

from medusa_train.config.load import shipped_dir

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPE = """\
# @package _global_
defaults:
  - /recipe/smoke
  - _self_

run_name: mine
prompts: {max_train: 8, max_calibration: 2, max_test: 1}
distill: {max_new_tokens: 8}
heads: {num_heads: 2}
evaluate: {num_prompts: 1, max_new_tokens: 8, gammas: [2]}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the checkout with the tools of this environment: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = run_command([*build, "--no-cache-dir", "-w", str(folder), str(ROOT)], folder)
    assert done.status == 0
    [found] = folder.glob("medusa_train-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel, and the libraries of this environment.

    Their folder is only put on the path, so that its own `.pth` files, one of which may lead to
    the checkout, are not read.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    done = run_command([*install, "--no-index", str(wheel)], folder)
    assert done.status == 0
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run_command([str(python), "-c", where], folder).out.strip())
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "libraries.pth").write_text("\n".join(sorted(libraries)) + "\n")
    return folder / "bin"


def test_the_wheel_holds_settings_recipes_and_prompts_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())

    for kind in ("configs", "recipes"):
        files = {p.relative_to(shipped_dir(kind)) for p in shipped_dir(kind).rglob("*.yaml")}
        assert {f"medusa_train/_{kind}/{file.as_posix()}" for file in files} <= names
    assert "medusa_train/data/prompt_material/passages.yaml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "outputs", "docs"))]


def test_the_installed_package_runs_a_users_recipe_from_another_folder(installed, tmp_path):
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(RECIPE)
    env = {"PATH": f"{installed}:{os.environ['PATH']}", "PYTHONPATH": "", "VIRTUAL_ENV": ""}
    where = "import medusa_train; print(medusa_train.__file__)"
    found = run_command([str(installed / "python"), "-c", where], tmp_path, env)
    assert str(installed.parent) in found.out

    command = [str(installed / "medusa-train"), "--config-dir", "conf", "+recipe=mine"]
    done = run_command(command, tmp_path, env)

    assert done.status == 0
    run = tmp_path / "outputs" / "mine"
    assert manifest(run / "medusa1")["settings"]["heads"]["num_heads"] == 2
    assert (run / "evaluate" / "report.md").is_file()


def test_the_console_script_lists_the_recipes(installed, tmp_path):
    done = run_command([str(installed / "medusa-train"), "--help"], tmp_path)

    assert done.status == 0
    assert "quickstart" in done.out
    assert "smoke" in done.out
