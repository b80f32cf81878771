"""The schema against the YAML that users read, and every combination that is refused."""

import copy
from dataclasses import asdict

import pytest
import yaml
from omegaconf import OmegaConf

from medusa_train.config.load import check, load, shipped_dir, valid_keys
from medusa_train.config.schema import Config
from medusa_train.errors import ConfigError

TREE = "evaluate.tree=[[0],[0,0],[0,0,0],[0,0,0,0],[0,0,0,0,0]]"


@pytest.fixture(scope="module")
def whole():
    """The defaults with a tiny model and heads over a reduced vocabulary."""
    return OmegaConf.create(asdict(load("model=tiny", "heads=reduced")))


def check_with(whole, setting: str) -> Config:
    """Check the defaults with one setting changed; the value is YAML. Composing would take long."""
    key, value = setting.split("=", 1)
    changed = copy.deepcopy(whole)
    OmegaConf.update(changed, key, yaml.safe_load(value), merge=True)
    return check(changed)


def test_the_shipped_yaml_names_no_key_that_is_not_in_the_schema():
    folder = shipped_dir("configs")
    files = {
        "": folder / "config.yaml",
        **{f"{p.parent.name}.": p for p in folder.glob("*/*.yaml")},
    }
    given = {
        prefix + str(key)
        for prefix, path in files.items()
        for key in OmegaConf.load(path)
        if key not in ("defaults", "hydra")
    }

    assert given - set(valid_keys()) == set()


@pytest.mark.parametrize("section", ["heads", "model", "deepspeed", "track"])
def test_every_choice_of_a_group_fits_the_schema(section):
    for path in (shipped_dir("configs") / section).glob("*.yaml"):
        name = "model.name=some/model" if section == "model" else "model=tiny"

        needed = ["deepspeed.config=a.json"] if path.stem == "custom" else []
        load(name, f"{section}={path.stem}", *needed)


def test_a_config_cannot_be_changed(whole):
    with pytest.raises(AttributeError):
        check(whole).seed = 3  # pyright: ignore


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("prompts.test_share=0", "above 0"),
        ("prompts={calibration_share: 0.6, test_share: 0.5}", "below 1"),
        ("prompts.max_test=0", "max_test must be at least 1"),
        ("distill.temperature=-1", "temperature must be at least 0, got -1"),
        ("distill.top_p=0", "top_p must be in (0, 1]"),
        ("distill.top_p=1.5", "top_p must be in (0, 1]"),
        ("distill.max_new_tokens=1", "max_new_tokens must be >= 2"),
        ("distill.batch_size=0", "batch_size must be at least 1"),
        ("heads.num_heads=0", "num_heads must be 1 to 16, got 0"),
        ("heads.num_heads=17", "num_heads must be 1 to 16, got 17"),
        ("heads.num_layers=9", "num_layers must be 0 to 8"),
        ("heads={lm_head: shared, vocab_size: null, num_layers: 0}", "leaves nothing to train"),
        ("heads.vocab_size=null", "give a size with lm_head=reduced"),
        ("heads.lm_head=own", "vocab_size=8192 with lm_head=own"),
        ("heads.vocab_size=1", "vocab_size must be at least 2"),
        ("medusa1.head_weight=0", "head_weight must be above 0"),
        ("medusa1.optim.lr=0", "lr must be above 0"),
        ("medusa1.optim.weight_decay=-0.1", "weight_decay must be at least 0"),
        ("medusa1.optim.betas=[0.9,1.0]", "betas must be in [0, 1)"),
        ("medusa1.optim.warmup_ratio=1.1", "warmup_ratio must be 0 to 1"),
        ("medusa1.optim.grad_clip=0", "grad_clip must be above 0"),
        ("medusa1.optim.max_steps=0", "max_steps must be at least 1 or null"),
        ("medusa1.optim.epochs=0", "epochs must be at least 1, got 0"),
        ("medusa1.optim.save_every=0", "save_every must be at least 1"),
        ("draft.optim.micro_batch_size=0", "micro_batch_size must be at least 1"),
        (
            "draft.optim.micro_batch_size=3",
            "128 is not a multiple of micro_batch_size=3",
        ),
        ("draft.num_layers=0", "num_layers must be at least 1"),
        ("draft.vocab_size=1", "vocab_size must be at least 2 or null"),
        ("evaluate.num_prompts=0", "num_prompts must be at least 1"),
        ("evaluate.max_new_tokens=0", "max_new_tokens must be >= 1"),
        ("evaluate.gammas=[]", "gammas needs at least one number"),
        ("evaluate.gammas=[2,0]", "all at least 1, got [2, 0]"),
        ("evaluate.tree_sizes=[257]", "from 1 to 256"),
        ("evaluate.tree=[]", "tree is an empty list"),
        ("evaluate.max_rank=0", "max_rank must be at least 1"),
        ("evaluate.latency_repeats=4", "latency_repeats must be >= 5"),
        ("evaluate.warmup_prompts=-1", "warmup_prompts must be >= 0"),
        ("evaluate.bootstrap_samples=99", "bootstrap_samples: 99 < 100"),
        ("deepspeed.zero_stage=0", "zero_stage is 1, 2 or 3, got 0"),
        ("stages=[]", "stages is empty"),
        ("stages=[draft,distill]", "in the order distill, medusa1, medusa2, draft, evaluate"),
        ("stages=[draft,draft]", "must each stand once"),
        (TREE, "evaluate.tree is 5 deep, but heads.num_heads=4"),
        ("medusa1.hidden_states=cached", "needs distill.hidden_states=true"),
        ("run_name=' '", "run_name=' ': expected the name of one folder"),
        ("run_name=../x", "run_name='../x': expected the name of one folder"),
        ("run_name=" + "x" * 201, "at most 200 bytes"),
    ],
)
def test_a_bad_value_or_combination_is_refused_with_its_reason(whole, override, says):
    with pytest.raises(ConfigError) as refused:
        check_with(whole, override)

    assert says in str(refused.value)
    assert str(refused.value).startswith("1 setting(s)")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1.0", "seed"),
        ("seed='1'", "seed"),
        ("distill.hidden_states=1", "distill.hidden_states"),
        ("distill.max_new_tokens=true", "distill.max_new_tokens"),
        ("medusa1.optim.lr=fast", "medusa1.optim.lr"),
        ("medusa1.optim.betas=[0.9]", "medusa1.optim.betas"),
        ("model.attention=flash", "model.attention"),
        ("stages=distill", "stages"),
        ("track.tags=[1]", "track.tags"),
    ],
)
def test_nothing_is_converted_silently(whole, override, key):
    with pytest.raises(ConfigError, match=rf"  - {key}"):
        check_with(whole, override)


def test_whole_numbers_do_where_a_fraction_is_expected(whole):
    assert check_with(whole, "medusa1.optim.lr=1").medusa1.optim.lr == 1.0
