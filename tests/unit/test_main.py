"""The command line: arguments made tidy, faults as sentences, exit statuses."""

import errno

import pytest
from command_case import run_here

from medusa_train import __main__ as command
from medusa_train import pipeline
from medusa_train.config.load import shipped_recipes
from medusa_train.errors import ConfigError, DataError, Interrupted

SMOKE = "+recipe=smoke"


@pytest.fixture
def stages(monkeypatch):
    """What the command line hands to the stages, which do nothing."""
    handed = []
    monkeypatch.setattr(pipeline, "run_stages", lambda *given: handed.append(given))
    return handed


def failing(monkeypatch, error: BaseException) -> None:
    def fail(*_):
        raise error

    monkeypatch.setattr(pipeline, "run_stages", fail)


@pytest.mark.parametrize("argument", ["--local_rank=3", "--local-rank=3"])
def test_the_rank_that_deepspeed_adds_is_dropped(argument):
    assert command.tidy([argument, SMOKE]) == [SMOKE]


@pytest.mark.parametrize(
    ("argument", "tidied"),
    [
        ("heads.num_heads=2", "++heads.num_heads=2"),
        ("unknown=2", "++unknown=2"),
        ("seed=1,2", "++seed=1,2"),
        ("description=", "++description="),
        ("heads=shared", "heads=shared"),
        ("recipe=smoke", "recipe=smoke"),
        ("hydra.run.dir=here", "hydra.run.dir=here"),
        ("hydra/launcher=basic", "hydra/launcher=basic"),
        ("model@other=tiny", "model@other=tiny"),
        ("+seed=1", "+seed=1"),
        ("++seed=1", "++seed=1"),
        ("~track", "~track"),
        ("--config-dir=here", "--config-dir=here"),
        ("--multirun", "--multirun"),
    ],
)
def test_settings_are_forced_so_that_our_own_check_sees_unknown_ones(argument, tidied):
    assert command.tidy([argument]) == [tidied]


@pytest.mark.parametrize("argument", ["prompts.path=a=b", "prompts.path=/data/a(b", "+x=a=b"])
def test_a_value_that_needs_quotes_is_answered_with_how_to_quote_it(argument):
    key, value = argument.split("=", 1)

    with pytest.raises(ConfigError, match="quote a value") as refused:
        command.tidy([argument])

    assert str(refused.value).endswith(f"'{key}=\"{value}\"'")
    assert command.tidy([f'{key}="{value}"'])[0].endswith(f'{key}="{value}"')


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "a\\b", "..", ".", "", "' '", '"../x"'])
def test_a_run_name_that_is_no_folder_name_is_refused_before_a_folder_is_made(tmp_path, name):
    cwd = tmp_path / "deep" / "down"
    cwd.mkdir(parents=True)

    done = run_here(cwd, SMOKE, f"run_name={name}")

    assert done.status == 2
    assert "expected the name of one folder, which is made in outputs: no /, no" in done.err
    assert done.err.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if not cwd.is_relative_to(path)] == []


@pytest.mark.parametrize("argument", ["run_name=two words", "run_name=v1.2", "run_name=a-${seed}"])
def test_other_run_names_are_taken(argument):
    assert command.tidy([argument]) == [f"++{argument}"]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("+recipe=smok", "+recipe=smok: no recipe 'smok', did you mean smoke? Known: quickstart, "),
        (
            "heads=shard",
            "heads=shard: no heads 'shard', did you mean shared? Known: own, reduced, ",
        ),
        ("+recipe=xyzzy", "+recipe=xyzzy: no recipe 'xyzzy'; known: quickstart, "),
        ("+recipe=", "+recipe= chooses nothing: expected one of quickstart, "),
    ],
)
def test_a_choice_that_there_is_not_is_answered_with_the_nearest(argument, says):
    with pytest.raises(ConfigError) as refused:
        command.tidy([argument])
    assert str(refused.value).startswith(says)


def test_recipes_of_ones_own_are_left_to_hydra():
    argv = ["--config-dir", "mine", "+recipe=smok"]
    assert command.tidy(argv) == argv
    assert command.tidy(["heads=own,shared"]) == ["heads=own,shared"]  # a sweep


def test_help_lists_every_recipe_and_the_groups(tmp_path):
    done = run_here(tmp_path, SMOKE, "--help")

    assert done.status == 0
    for name, description in shipped_recipes().items():
        assert f"{name:<12} {description}" in done.out
    assert "own, reduced, shared" in done.out
    assert list(tmp_path.iterdir()) == []


def test_stages_get_the_checked_settings_and_the_folder_of_the_run(tmp_path, stages):
    done = run_here(tmp_path, "--local_rank=0", SMOKE, "heads.num_heads=2", "run_name=mine")

    [(config, folder)] = stages
    assert done.status == 0
    assert config.heads.num_heads == 2
    assert folder == tmp_path / "outputs" / "mine"
    assert (folder / ".hydra" / "rank0" / "config.yaml").is_file()


def test_faults_in_settings_end_with_2_before_any_stage(tmp_path, stages):
    done = run_here(tmp_path, SMOKE, "haeds.num_heads=2", "seed=x", "heads.num_heads=0")

    assert (done.status, stages) == (2, [])
    assert "3 setting(s) to change" in done.err
    assert "did you mean heads?" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["+recipe=nope"], "smoke"),
        (["recipe=smoke"], "+recipe=smoke"),
        ([SMOKE, "heads=nope"], "reduced"),
        ([SMOKE, "run_name=a,b"], "quote"),
        ([SMOKE, "prompts.path=a=b"], "quote"),
        ([], "model.name=..."),
        (["--no-such-option"], "--no-such-option"),
        (["smoke"], "smoke"),
    ],
)
def test_what_cannot_be_composed_ends_with_2_and_says_what_can(tmp_path, stages, arguments, says):
    done = run_here(tmp_path, *arguments)

    assert (done.status, stages) == (2, [])
    assert says in done.err


def test_cfg_job_prints_the_settings_and_runs_nothing(tmp_path, stages):
    done = run_here(tmp_path, SMOKE, "seed=7", "--cfg", "job")

    assert (done.status, stages) == (0, [])
    assert "seed: 7" in done.out
    assert "num_heads: 3" in done.out


def test_multirun_gives_each_job_a_folder(tmp_path, stages):
    done = run_here(tmp_path, "--multirun", SMOKE, "seed=1,2")

    assert done.status == 0
    assert [config.seed for config, _ in stages] == [1, 2]
    assert [folder.name for _, folder in stages] == ["smoke-0", "smoke-1"]


def test_multirun_under_a_launcher_is_refused(tmp_path, stages, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    done = run_here(tmp_path, "--multirun", SMOKE, "seed=1,2")

    assert (done.status, stages) == (2, [])
    assert "--multirun works with one process" in done.err


def test_a_users_recipe_may_build_on_a_shipped_one(tmp_path, stages):
    recipe = tmp_path / "conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        "# @package _global_\ndefaults:\n  - /recipe/smoke\n  - _self_\n"
        "run_name: mine\nheads: {num_heads: 2}\n"
    )

    done = run_here(tmp_path, "--config-dir", "conf", "+recipe=mine", "seed=4")

    [(config, folder)] = stages
    assert done.status == 0
    assert (config.heads.num_heads, config.heads.vocab_size, config.seed) == (2, 128, 4)
    assert folder.name == "mine"


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ConfigError("this key"), 2, "this key"),
        (DataError("this file"), 1, "this file"),
        (Interrupted("stopped by SIGTERM", signal_number=15), 143, "SIGTERM"),
        (KeyboardInterrupt(), 130, "the same command goes on"),
        (OSError(errno.ENOSPC, "No space left on device", "x.part"), 1, "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "Permission denied: '/x'"),
    ],
)
def test_what_a_user_can_change_is_a_sentence_and_a_status(
    tmp_path, monkeypatch, error, status, says
):
    failing(monkeypatch, error)

    done = run_here(tmp_path, SMOKE)

    assert done.status == status
    assert says in done.err
    assert says in (tmp_path / "outputs" / "smoke" / "medusa_train.rank0.log").read_text()


def test_a_fault_of_the_package_keeps_its_traceback(tmp_path, monkeypatch):
    failing(monkeypatch, ZeroDivisionError("ours"))

    with pytest.raises(AssertionError, match="ZeroDivisionError: ours"):
        run_here(tmp_path, SMOKE)
