import json
from dataclasses import replace

import pytest

from medusa_train.config.deepspeed import deepspeed_settings
from medusa_train.config.load import load
from medusa_train.errors import ConfigError


def composed(*overrides):
    return load("model=tiny", "run_name=t", *overrides)


# 8 rows a step: 2 a micro-batch, 2 micro-batches, 2 processes
OPTIM = replace(composed().medusa1.optim, batch_size=8, micro_batch_size=2, grad_clip=1.0)
RUN = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
}


@pytest.fixture
def settings(tmp_path):
    """What becomes of a file with such content, or of such text."""

    def made(content):
        path = tmp_path / "mine.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        config = composed("deepspeed=custom", f"deepspeed.config={path}").deepspeed
        return deepspeed_settings(config, OPTIM, 2)

    return made


def conflicts(settings, content):
    with pytest.raises(ConfigError) as caught:
        settings(content)
    head, *lines = str(caught.value).splitlines()
    assert f"does not agree with the run, {len(lines)} key(s) to change" in head
    return dict(line.removeprefix("  - ").split(": ", 1) for line in lines)


@pytest.mark.parametrize(
    ("choice", "stage", "offloaded"),
    [
        ("zero1", 1, set()),
        ("zero2", 2, set()),
        ("zero3", 3, set()),
        ("zero2_offload", 2, {"offload_optimizer"}),
        ("zero3_offload", 3, {"offload_optimizer", "offload_param"}),
    ],
)
def test_shipped_choices(choice, stage, offloaded):
    config = composed(f"deepspeed={choice}").deepspeed
    made = deepspeed_settings(config, OPTIM, 2)
    zero = made["zero_optimization"]
    assert made.items() >= RUN.items()
    assert zero["stage"] == stage
    assert {key for key in zero if key.startswith("offload")} == offloaded
    assert made.get("zero_force_ds_cpu_optimizer", True) is not bool(offloaded)


def test_auto_and_absent_values_are_filled_from_the_run_and_the_rest_is_passed_on(settings):
    made = settings(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": False, "loss_scale_window": 7},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999]}},
            "scheduler": {"type": "auto"},
            "comms_logger": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "stage3_gather_16bit_weights_on_model_save": True,
                "reduce_bucket_size": "auto",
            },
        }
    )
    assert made == {
        **RUN,
        "bf16": {},
        "fp16": {"enabled": False, "loss_scale_window": 7},
        "comms_logger": {"enabled": True},
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }


def test_accumulation_that_the_file_leaves_out_is_that_of_the_run_not_one(settings):
    assert settings({"zero_optimization": {"stage": 1}})["gradient_accumulation_steps"] == 2


def test_all_conflicts_are_told_at_once_with_their_kinds(settings):
    found = conflicts(
        settings,
        {
            "zero_optimization": {"stage": 2},
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": "2",
            "gradient_clipping": 0.5,
            "bf16": {"enabled": True},
            "fp16": {"enabled": True},
            "optimizer": {"type": "Adam", "params": {"lr": 1.0, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR"},
        },
    )
    assert found.keys() == {
        "train_batch_size",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "fp16.enabled",
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.torch_adam",
        "scheduler.type",
    }
    batch = "32 (integer) in the file, 8 (integer) in the run (the run's is optim.batch_size)"
    assert found["train_batch_size"].startswith(batch)
    text = found["gradient_accumulation_steps"]
    assert text.startswith("'2' (text) in the file, 2 (integer) in the run")
    assert text.endswith('write 2 or "auto"')


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({}, "nothing in the file, expected 1, 2 or 3"),
        ({"stage": 0}, "0 (integer) in the file, expected 1, 2 or 3"),
        ({"stage": "3"}, "'3' (text) in the file, expected 1, 2 or 3"),
    ],
)
def test_a_stage_that_is_missing_zero_or_text_is_refused(settings, zero, message):
    assert conflicts(settings, {"zero_optimization": zero})["zero_optimization.stage"].startswith(
        message
    )


def test_outdated_keys_are_refused_with_what_took_their_place(settings):
    zero = {"stage": 2, "cpu_offload": True, "stage3_gather_fp16_weights_on_model_save": False}
    found = conflicts(settings, {"zero_optimization": zero})
    assert found == {
        "zero_optimization.cpu_offload": (
            'outdated: write "offload_optimizer": {"device": "cpu"} instead'
        ),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
            'outdated: write "stage3_gather_16bit_weights_on_model_save" instead'
        ),
    }


def test_what_would_change_the_loss_is_refused(settings):
    zero = {"stage": 1}
    found = conflicts(
        settings,
        {
            "gradient_allreduce_op": "sum",
            "sequence_parallel_size": 2,
            "zero_optimization": zero,
        },
    )
    assert found.keys() == {"gradient_allreduce_op", "sequence_parallel_size"}
    assert settings({"gradient_allreduce_op": "mean", "zero_optimization": zero})


def test_offload_in_a_file_needs_no_compiler_and_no_nvme(settings):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert settings({"zero_optimization": zero})["zero_force_ds_cpu_optimizer"] is False
    found = conflicts(
        settings,
        {
            "zero_force_ds_cpu_optimizer": True,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        },
    )
    assert found.keys() == {
        "zero_optimization.offload_optimizer.device",
        "zero_force_ds_cpu_optimizer",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", r"holds \[\] \(list\), expected a section"),
        ('{"a": 1, "a": 2}', "a stands twice"),
    ],
)
def test_a_file_that_is_no_settings_is_refused(settings, content, message):
    with pytest.raises(ConfigError, match=message):
        settings(content)


def test_a_missing_file_is_refused():
    config = composed("deepspeed=custom", "deepspeed.config=not/there.json").deepspeed
    with pytest.raises(ConfigError, match=r"not/there\.json cannot be read \(No such file"):
        deepspeed_settings(config, OPTIM, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["deepspeed=custom"], "deepspeed.config has no value"),
        (["deepspeed=custom", "deepspeed.config=x", "deepspeed.zero_stage=2"], "zero_stage=null"),
        (["deepspeed=auto", "deepspeed.offload=true"], "are for engine=deepspeed, got engine=auto"),
        (["deepspeed=zero1", "deepspeed.zero_stage=null"], "zero_stage is 1, 2 or 3, got None"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        composed(*overrides)
