"""Run by the launcher in `test_parallel_training.py`: trains as the arguments say, as one rank.

Arguments: the folder of the rows, then for each run `stage folder zero_stage engine until`, where
`until` is `all`, the number of the step at which the last rank gets SIGTERM, or `nan`: then the
last rank finds a hidden state that is not a number at step 1.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from training_case import make_backbone, make_config

from medusa_train.errors import Interrupted, TrainingError
from medusa_train.parallel import current_world, leave
from medusa_train.track.manifest import Stage
from medusa_train.train import loop
from medusa_train.train.draft import train_draft
from medusa_train.train.medusa1 import train_medusa1

TRAIN = {"medusa1": train_medusa1, "draft": train_draft}


def one_run(distill: Path, name: str, folder: str, zero: str, engine: str, until: str) -> None:
    # ZeRO-3 keeps small tensors whole: matrices of this size are shared out
    world, backbone = current_world(), make_backbone(hidden_size=128)
    world.start(backbone.device)
    config = make_config(
        f"deepspeed.zero_stage={zero}",
        f"deepspeed.engine={engine}",
        "heads.num_heads=2",
        *(f"{stage}.optim.micro_batch_size=1" for stage in TRAIN),
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
    try:
        summary = TRAIN[name](config, stage, distill, backbone, world)
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
    rows, *runs = sys.argv[1:]
    for start in range(0, len(runs), 5):
        one_run(Path(rows), *runs[start : start + 5])
    leave(0)
