import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from training_case import ALONE, make_backbone, make_config, make_fit, make_stage, write_rows

from medusa_train.errors import Interrupted
from medusa_train.parallel import World
from medusa_train.train import loop
from medusa_train.train.medusa2 import train_medusa2


def drawn(fit) -> list[float]:
    """A number for each micro-batch that is trained on; the global state stays as it was."""
    numbers, accumulate = [], fit.engine.accumulate

    def drawing(batch, scales):
        numbers.append(float(torch.rand(())))
        return accumulate(batch, scales)

    fit.engine.accumulate = drawing
    before = torch.get_rng_state()
    fit.run()
    assert torch.equal(torch.get_rng_state(), before)
    return numbers


def test_random_numbers_follow_from_the_place_in_the_run(tmp_path):
    whole = drawn(make_fit(tmp_path / "a"))
    first = drawn(make_fit(tmp_path / "b", max_steps=2))
    torch.manual_seed(8)
    rest = drawn(make_fit(tmp_path / "b"))
    assert len(set(whole)) == 8
    assert first + rest == whole


def test_random_numbers_do_not_depend_on_how_many_share_a_step(tmp_path):
    fit = make_fit(tmp_path, batch_size=8)

    def share(rank: int, size: int) -> list[float]:
        numbers: list[float] = []

        def accumulate(batch, scales):
            numbers.append(float(torch.rand(())))
            return torch.zeros(3)

        fit.world = World(rank=rank, size=size)
        fit.engine = SimpleNamespace(accumulate=accumulate, step=lambda: {"all": 0.0})
        fit._update(fit._micro_batches(), [1, 1, 1])
        return numbers

    alone, (first, second) = share(0, 1), (share(rank, 2) for rank in range(2))
    assert [first[0], second[0], first[1], second[1]] == alone
    assert len(set(alone)) == 4


def test_a_resumed_run_with_dropout_ends_bit_for_bit_like_an_unbroken_one(tmp_path, monkeypatch):
    distill = write_rows(tmp_path / "distill")
    config = make_config("medusa2.start=fresh", "medusa2.lora.dropout=0.5", "medusa2.merge=false")

    def train(folder: str) -> dict[str, torch.Tensor]:
        stage = make_stage(tmp_path / folder, "medusa2")
        train_medusa2(config, stage, distill, None, make_backbone(), ALONE)
        heads = load_file(stage.folder / "heads" / "medusa_lm_head.safetensors")
        return heads | load_file(stage.folder / "adapter" / "adapter_model.safetensors")

    whole = train("whole")
    micro_batches = loop.Fit._micro_batches
    with monkeypatch.context() as patch:

        def interrupt(self):
            if self.state.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return micro_batches(self)

        patch.setattr(loop.Fit, "_micro_batches", interrupt)
        with pytest.raises(Interrupted):
            train("broken")
    torch.manual_seed(8)
    broken = train("broken")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
