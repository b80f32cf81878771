import pytest

from medusa_train.errors import DataError
from medusa_train.parallel import World, current_world


def test_the_rank_is_the_one_that_the_launcher_tells_by_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert current_world() == World(rank=0, size=1)
    assert current_world().is_main
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert current_world() == World(rank=3, size=4)
    assert not current_world().is_main


def test_only_the_first_process_acts_and_what_comes_of_it_all_get():
    shared = []

    class Both(World):
        def gather(self, value):
            shared.append(value)
            return shared[:1]

    assert [Both(rank=rank, size=2).first(lambda: "done") for rank in (0, 1)] == ["done", "done"]
    assert shared == [("done", None), (None, None)]

    def refuse():
        raise DataError("no")

    shared.clear()
    for rank in (0, 1):
        with pytest.raises(DataError, match="no"):
            Both(rank=rank, size=2).first(refuse)
