"""The stage `draft`: the baseline's model, a language model of the target's own answers.

Legend: P positions, D hidden size.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.config.schema import Config
from medusa_train.data.batch import TokenBatch, row_targets, token_batch
from medusa_train.data.rows import Row
from medusa_train.model.backbone import Backbone
from medusa_train.model.device import choose_dtype
from medusa_train.model.draft import DraftModel, cut_draft, load_existing, save_draft
from medusa_train.ops.loss import IGNORE
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage
from medusa_train.track.places import DRAFT_FOLDER
from medusa_train.train.engine import Engine
from medusa_train.train.objective import (
    Gather,
    Measured,
    Objective,
    ParameterGroup,
    measure_head,
    products_in,
    ranks_by_row,
)
from medusa_train.train.run import choose_vocabulary, read_rows, take, train_objective


class DraftObjective(Objective):
    """One "head", one ahead."""

    names = ("lm",)
    score_name = "top1"

    def __init__(
        self, draft: DraftModel, *, compute_dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.draft = draft
        self._dtype = compute_dtype
        self._device = device
        self.eval()

    def weights(self, progress: float) -> tuple[float, ...]:
        """As `Objective.weights`."""
        return (1.0,)

    def groups(self) -> list[ParameterGroup]:
        """As `Objective.groups`."""
        trained = [p for p in self.draft.parameters() if p.requires_grad]
        return [ParameterGroup(name="draft", parameters=trained)]

    def batch(self, rows: Sequence[Row]) -> TokenBatch:
        """Whole rows, padded."""
        return token_batch(rows, self._device)

    def target_counts(self, rows: Sequence[Row]) -> Tensor:
        """As `Objective.target_counts`."""
        counts = torch.zeros(1, dtype=torch.long)
        for row in rows:
            targets = row_targets(row, 1, first=1)
            if self.draft.token_map is not None:
                targets = self.draft.to_draft_ids(targets.to(self.draft.token_map.device)).cpu()
            counts += (targets != IGNORE).sum()
        return counts

    def trunk(self, batch: TokenBatch) -> Tensor:
        """As `Objective.trunk`: of the positions with a target in the full vocabulary."""
        attention_mask = None if bool(batch.attend.all()) else batch.attend
        with products_in(self._dtype, batch.ids.device):
            hidden = self.draft.decoder(
                input_ids=batch.ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state
        return hidden[batch.targets != IGNORE].float()

    def losses(self, trunk: Tensor, batch: TokenBatch) -> Iterator[Tensor]:
        """As `Objective.losses`."""
        yield self.draft.lm_head(trunk, self._targets(batch), compute_dtype=self._dtype)

    @torch.no_grad()
    def measure(self, batch: TokenBatch, gather: Gather) -> Measured:
        """As `Objective.measure`."""
        hidden, targets = self.trunk(batch), self._targets(batch)
        head = self.draft.lm_head
        with gather(head):
            loss, ranks = measure_head(
                head.prepared(hidden), head.out_features, targets, self._dtype
            )
        wanted = torch.ones_like(targets, dtype=torch.bool).unsqueeze(0)
        ends = (batch.targets != IGNORE).sum(dim=1).cumsum(0).tolist()
        spans = list(zip([0, *ends], ends, strict=False))
        return Measured(
            losses=loss.view(1).cpu(),
            counts=(targets != IGNORE).sum().double().view(1).cpu(),
            ranks=ranks_by_row(ranks.unsqueeze(0), wanted, spans),
        )

    def score(self, measured: Measured) -> float:
        """As `Objective.score`: the share of tokens that greedy decoding would accept."""
        return measured.hits(1)[0]

    def _targets(self, batch: TokenBatch) -> Tensor:
        """Draft ids at the positions of `trunk`, [P]."""
        return self.draft.to_draft_ids(batch.targets[batch.targets != IGNORE])


def train_draft(
    config: Config, stage: Stage, distill: Path, backbone: Backbone, world: World
) -> dict[str, Any]:
    """Train a draft model cut from the target; it ends up in `stage.folder / "model"`.

    With `draft.model` set nothing is trained or written: that model is checked instead.
    Arguments, result and errors are those of `train_medusa1`, with one "head".
    """
    device, settings = backbone.device, config.draft
    if settings.model is not None:
        existing = load_existing(settings.model, backbone, config.model)
        parameters = sum(p.numel() for p in existing.decoder.parameters())
        nothing = {"steps": 0, "tokens": 0, "seconds": 0.0, "bytes": 0, "coverage": 1.0}
        unknown: dict[str, Any] = {"loss": [], "top1": [], "top5": []}
        return {"model": settings.model, "parameters": parameters, **nothing, **unknown}
    rows, held_out = read_rows(distill, backbone)
    token_map = choose_vocabulary(settings.vocab_size, rows, backbone)
    objective = DraftObjective(
        cut_draft(backbone, settings.num_layers, token_map, device=device),
        compute_dtype=choose_dtype(settings.optim.compute_dtype, device),
        device=device,
    )
    folder = stage.folder / DRAFT_FOLDER

    def save(_: Engine, trained: dict[str, Tensor]) -> None:
        if world.is_main:
            whole = cut_draft(backbone, settings.num_layers, token_map, device=torch.device("cpu"))
            take(whole, trained, prefix="draft.")
            save_draft(folder, whole, tokenizer=backbone.tokenizer)

    _, summary = train_objective(
        config,
        settings.optim,
        stage,
        objective,
        rows,
        held_out,
        distill=distill,
        backbone=backbone,
        world=world,
        save=save,
        results={"draft": folder},
        token_map=token_map,
    )
    return summary
