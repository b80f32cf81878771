"""Run by the launcher in `test_parallel_training.py`: trains as the arguments say, as one rank.

Arguments: the folder of the rows, then runs as JSON: a list of `stage`, `folder`, `settings`
(overrides) and `until`, which is `all`, the number of the step at which the last rank gets SIGTERM,
or `nan`: then the last rank finds a hidden state that is not a number at step 1.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from training_case import make_backbone, make_config

from medusa_train.config import deepspeed
from medusa_train.errors import Interrupted, TrainingError
from medusa_train.parallel import current_world, leave
from medusa_train.track.manifest import Stage
from medusa_train.train import loop, objective
from medusa_train.train.draft import train_draft
from medusa_train.train.medusa1 import train_medusa1
from medusa_train.train.medusa2 import train_medusa2

STAGES = ("medusa1", "medusa2", "draft")


def one_run(distill: Path, name: str, folder: str, settings: list[str], until: str) -> None:
    world, backbone = current_world(), make_backbone(hidden_size=128)
    world.start(backbone.device)
    config = make_config(
        "heads.num_heads=2",
        "medusa2.start=fresh",
        *(f"{stage}.optim.micro_batch_size=1" for stage in STAGES),
        *settings,
    )
    stage = Stage(name=name, folder=Path(folder), settings={})
    if world.is_main:
        stage.open()
    world.wait()
    is_last = world.rank == world.size - 1
    original = loop.Fit._micro_batches

    def micro_batches(self: loop.Fit):
        if until.isdigit() and self.state.step == int(until) and is_last:
            os.kill(os.getpid(), signal.SIGTERM)
        if until == "nan" and self.state.step == 1 and is_last:
            backbone.model.model.norm.weight.data.fill_(float("nan"))  # pyright: ignore
        return original(self)

    loop.Fit._micro_batches = micro_batches
    train = {
        "medusa1": partial(train_medusa1, config, stage, distill),
        "medusa2": partial(train_medusa2, config, stage, distill, None),
        "draft": partial(train_draft, config, stage, distill),
    }
    try:
        summary = train[name](backbone, world)
        if world.is_main:
            (stage.folder / "summary.json").write_text(json.dumps(summary))
    except Interrupted as error:
        (stage.folder / f"interrupted-{world.rank}").write_text(str(error.exit_status))
    except TrainingError as error:
        (stage.folder / f"failed-{world.rank}").write_text(str(error))
    finally:
        loop.Fit._micro_batches = original


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.KEPT_WHOLE = 0  # so that ZeRO-3 shares out what is small too, as a LoRA
    objective.LOGITS_BYTES = 4 * 320 * 5  # so that processes have unequal numbers of chunks
    for run in json.loads(sys.argv[2]):
        one_run(Path(sys.argv[1]), *run)
    leave(0)
