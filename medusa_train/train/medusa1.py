"""The stage `medusa1`: heads on a frozen backbone.

Legend: P positions, Q all positions of the rows, K heads, V vocabulary of the heads, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_train.config.schema import Config
from medusa_train.data.batch import HeadBatch, JointBatch, head_batch, row_targets
from medusa_train.data.hidden_states import HiddenSource, choose_source
from medusa_train.data.rows import Row
from medusa_train.model.backbone import Backbone
from medusa_train.model.device import choose_dtype
from medusa_train.model.heads import MedusaHeads, untrained_heads
from medusa_train.model.lm_head import LogitsAt
from medusa_train.model.weights import save_heads
from medusa_train.ops.loss import IGNORE, softmax_slices
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage
from medusa_train.track.places import HEADS_FOLDER
from medusa_train.train.engine import Engine
from medusa_train.train.objective import (
    Gather,
    Measured,
    Objective,
    ParameterGroup,
    Teacher,
    measure_head,
    ranks_by_row,
)
from medusa_train.train.run import (
    choose_vocabulary,
    make_teacher,
    read_rows,
    take,
    train_objective,
)


class Medusa1Objective(Objective):
    """Heads on the hidden states of a frozen backbone."""

    def __init__(
        self,
        heads: MedusaHeads,
        source: HiddenSource,
        *,
        shared_lm_head: Tensor | None,
        head_weight: float,
        compute_dtype: torch.dtype,
        teacher: Teacher | None = None,
    ) -> None:
        """Keep the heads; the backbone stays outside, behind `source`.

        Args:
            heads: trained, float32.
            source: gives the hidden states of rows.
            shared_lm_head: the backbone's LM head for `shared` heads, [V, D]; else None.
            head_weight: head k weighs `head_weight ** k`.
            compute_dtype: dtype of the matrix products.
            teacher: the backbone's logits over the heads' vocabulary, [Q, D] -> [Q, V]: heads then
                learn its whole distributions instead of the ids that came out; None for the ids.
        """
        super().__init__()
        self.heads = heads
        self.names = tuple(f"head{k}" for k in range(len(heads)))
        self._weights = tuple(head_weight**k for k in range(len(heads)))
        self._source = source
        # Detached, or assigning it would register a parameter; in the dtype of all its products
        self._shared = None if shared_lm_head is None else shared_lm_head.detach().to(compute_dtype)
        self._teacher = teacher
        self._dtype = compute_dtype

    def weights(self, progress: float) -> tuple[float, ...]:
        """As `Objective.weights`."""
        return self._weights

    def groups(self) -> list[ParameterGroup]:
        """As `Objective.groups`."""
        return [ParameterGroup(name="heads", parameters=list(self.heads.parameters()))]

    def batch(self, rows: Sequence[Row]) -> HeadBatch:
        """Hidden states and targets of the positions that teach something."""
        return head_batch(rows, self._source, self.heads)

    def target_counts(self, rows: Sequence[Row]) -> Tensor:
        """As `Objective.target_counts`."""
        return head_target_counts(rows, self.heads)

    def trunk(self, batch: HeadBatch) -> Tensor:
        """As `Objective.trunk`."""
        return batch.hidden

    def losses(self, trunk: Tensor, batch: HeadBatch) -> Iterator[Tensor]:
        """As `Objective.losses`."""
        taught = None if self._teacher is None else self._distributions(batch.states)
        for k, head in enumerate(self.heads.heads):
            teachers = batch.teachers[k]
            yield head(
                trunk,
                batch.targets[k],
                shared=self._shared,
                soft=None if taught is None else lambda at, rows=teachers: taught[rows[at]],
                compute_dtype=self._dtype,
            )

    @torch.no_grad()
    def _distributions(self, states: Tensor) -> Tensor:
        """What the backbone itself says after each state, [Q, D] -> [Q, V]; once for all heads."""
        assert self._teacher is not None
        return softmax_slices(self._teacher(states))

    @torch.no_grad()
    def measure(self, batch: HeadBatch, gather: Gather) -> Measured:
        """As `Objective.measure`."""
        return measure_heads(
            self.heads, batch.hidden, batch, self._prepared, dtype=self._dtype, gather=gather
        )

    def _prepared(self, features: Tensor) -> LogitsAt:
        """Logits of the shared LM head after `features`, [P, D]."""
        assert self._shared is not None
        weight = self._shared
        return lambda at: F.linear(features[at], weight)


def head_target_counts(rows: Sequence[Row], heads: MedusaHeads) -> Tensor:
    """Supervised pairs of each head, [K], int64, on the CPU."""
    counts = torch.zeros(len(heads), dtype=torch.long)
    for row in rows:
        targets = row_targets(row, len(heads))[:, row.states_start : len(row.ids) - 1]
        if heads.token_map is not None:
            targets = heads.to_head_ids(targets.to(heads.token_map.device)).cpu()
        counts += (targets != IGNORE).sum(dim=1)
    return counts


def measure_heads(
    heads: MedusaHeads,
    hidden: Tensor,
    batch: HeadBatch | JointBatch,
    shared: Callable[[Tensor], LogitsAt],
    *,
    dtype: torch.dtype,
    gather: Gather,
) -> Measured:
    """The held-out view of all heads.

    Args:
        heads: trained.
        hidden: [P, D].
        batch: its targets.
        shared: logits, from features [P, D], of the LM head of those that have none of their own.
        dtype: of the matrix products.
        gather: makes a head's weights whole.
    """
    size = heads.shape.head_vocab_size
    losses, ranks = [], []
    for head, targets in zip(heads, batch.targets, strict=True):
        features = head.features(hidden, compute_dtype=dtype).float()
        prepared = shared if head.lm_head is None else head.prepared
        with gather(head):
            loss, rank = measure_head(prepared(features), size, targets, dtype)
        losses.append(loss)
        ranks.append(rank)
    return Measured(
        losses=torch.stack(losses).cpu(),
        counts=(batch.targets != IGNORE).sum(dim=1).double().cpu(),
        ranks=ranks_by_row(torch.stack(ranks), batch.wanted, batch.spans),
    )


def train_medusa1(
    config: Config, stage: Stage, distill: Path, backbone: Backbone, world: World
) -> dict[str, Any]:
    """Train heads on the frozen backbone; they end up in `stage.folder / "heads"`.

    Args:
        config: the whole run.
        stage: opened and unfinished; an interrupted run goes on from its last checkpoint.
        distill: folder of the rows: `train` is learnt, `calibration` is held out.
        backbone: on its device.
        world: this process among the others; all of them call this.

    Returns:
        What `train_objective` says of it, the same on every process.

    Raises:
        MedusaError: whatever a user can change; see the modules that are called.
    """
    rows, held_out = read_rows(distill, backbone)
    heads = fresh_heads(config, rows, backbone)
    lm_head: Tensor = backbone.lm_head.weight.detach()  # pyright: ignore
    dtype = choose_dtype(config.medusa1.optim.compute_dtype, backbone.device)
    objective = Medusa1Objective(
        heads,
        choose_source(
            config.medusa1.hidden_states,
            [*rows, *held_out],
            backbone.hidden_states,
            num_heads=len(heads),
            device=backbone.device,
            stage="medusa1",
        ),
        shared_lm_head=lm_head if heads.shape.lm_head == "shared" else None,
        head_weight=config.medusa1.head_weight,
        compute_dtype=dtype,
        teacher=make_teacher(backbone, heads.token_map, dtype)
        if config.medusa1.soft_targets
        else None,
    )
    folder = stage.folder / HEADS_FOLDER

    def save(_: Engine, trained: dict[str, Tensor]) -> None:
        if world.is_main:
            whole = MedusaHeads(heads.shape, heads.token_map)
            take(whole, trained, prefix="heads.")
            save_heads(folder, whole, base_model=backbone.name)

    _, summary = train_objective(
        config,
        config.medusa1.optim,
        stage,
        objective,
        rows,
        held_out,
        distill=distill,
        backbone=backbone,
        world=world,
        save=save,
        results={"heads": folder},
        token_map=heads.token_map,
    )
    return summary


def fresh_heads(config: Config, rows: Sequence[Row], backbone: Backbone) -> MedusaHeads:
    """Untrained heads on the backbone's device, float32, that say what its LM head says."""
    weight: Tensor = backbone.lm_head.weight  # pyright: ignore
    return untrained_heads(
        weight,
        num_heads=config.heads.num_heads,
        num_layers=config.heads.num_layers,
        lm_head=config.heads.lm_head,
        token_map=choose_vocabulary(config.heads.vocab_size, rows, backbone),
    )
