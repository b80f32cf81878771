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
