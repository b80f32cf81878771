"""The benchmark's modules can be imported, and a case so small that it measures nothing."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def _scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


@pytest.fixture(scope="module")
def case():
    from bench.case import build_case

    return build_case(model=None, repeats=5, tiny=True)
