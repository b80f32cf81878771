"""What Medusa-2 optimises: the base LM head's loss beside the heads'.

Legend: P positions, Q all positions of the rows, L losses, K heads, V vocabulary, D hidden size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa_train.config.training import Medusa2Config
from medusa_train.data.batch import JointBatch, joint_batch, row_targets
from medusa_train.data.hidden_states import HiddenSource
from medusa_train.data.rows import Row
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.student import Student
from medusa_train.ops.loss import IGNORE, SoftTargets, softmax_slices
from medusa_train.train.medusa1 import head_target_counts, measure_heads
from medusa_train.train.objective import (
    Gather,
    Measured,
    Objective,
    ParameterGroup,
    Teacher,
    measure_head,
    products_in,
)


class Medusa2Objective(Objective):
    """All losses read the hidden states of the student, which has a gradient."""

    def __init__(
        self,
        student: Student,
        heads: MedusaHeads,
        source: HiddenSource,
        teacher: Teacher,
        settings: Medusa2Config,
        *,
        compute_dtype: torch.dtype,
        heads_teacher: Teacher | None = None,
    ) -> None:
        """Take the two that are trained.

        Args:
            student: the backbone in training.
            heads: float32, on its device.
            source: hidden states of the original model.
            teacher: its logits over the whole vocabulary, [p, D] -> [p, V].
            settings: of the stage.
            compute_dtype: dtype of the matrix products.
            heads_teacher: as `teacher`, over the heads' vocabulary, if they are to learn whole
                distributions; None for the ids.
        """
        super().__init__()
        self.student, self.heads = student, heads
        self._source, self._settings = source, settings
        self._teacher, self._heads_teacher = teacher, heads_teacher
        self._dtype = compute_dtype
        self._near = settings.keep_near > 0
        near = ("near",) if self._near else ()
        self.names = ("base", *near, *(f"head{k}" for k in range(len(heads))))
        if settings.gradient_checkpointing:
            student.checkpoint_gradients()

    def weights(self, progress: float) -> tuple[float, ...]:
        """As `Objective.weights`."""
        match self._settings.heads_ramp:
            case "constant":
                ramp = 1.0
            case "linear":
                ramp = progress
            case _:
                ramp = math.sin(progress * math.pi / 2)
        heads = self._settings.heads_weight * ramp
        near = (self._settings.keep_near,) if self._near else ()
        decay = self._settings.head_weight
        return (1.0, *near, *(heads * decay**k for k in range(len(self.heads))))

    def groups(self) -> list[ParameterGroup]:
        """As `Objective.groups`."""
        backbone = [p for p in self.student.parameters() if p.requires_grad]
        return [
            ParameterGroup(name="backbone", parameters=backbone),
            ParameterGroup(
                name="heads",
                parameters=list(self.heads.parameters()),
                lr_factor=self._settings.heads_lr_factor,
            ),
        ]

    def batch(self, rows: Sequence[Row]) -> JointBatch:
        """Whole rows, and the original model's hidden states where they are learnt from."""
        return joint_batch(rows, self._source, self.heads, self.student.device)

    def target_counts(self, rows: Sequence[Row]) -> Tensor:
        """As `Objective.target_counts`."""
        base = sum(int((row_targets(row, 1, first=1) != IGNORE).sum()) for row in rows)
        repeated = [base] * (len(self.names) - len(self.heads))
        return torch.cat([torch.tensor(repeated), head_target_counts(rows, self.heads)])

    def trunk(self, batch: JointBatch) -> Tensor:
        """As `Objective.trunk`."""
        with products_in(self._dtype, batch.ids.device):
            hidden = self.student.hidden_states(batch.ids, batch.attend)
        return hidden.flatten(0, 1)[batch.place].float()

    def losses(self, trunk: Tensor, batch: JointBatch) -> Iterator[Tensor]:
        """As `Objective.losses`: of the base LM head, then of the heads."""
        original = self._original(self._teacher, batch, 0)
        distill = self._settings.base_loss == "self_distill"
        for soft in (original if distill else None, *([original] if self._near else [])):
            yield self.student.lm_head(
                trunk, batch.base_targets, soft=soft, compute_dtype=self._dtype
            )
        for k, (head, targets) in enumerate(zip(self.heads, batch.targets, strict=True)):
            soft = None
            if self._heads_teacher is not None:
                soft = self._original(self._heads_teacher, batch, 1 + k)
            inputs, module = trunk, head
            if head.lm_head is None:
                inputs = head.features(trunk, compute_dtype=self._dtype)
                module = self.student.lm_head
            yield module(inputs, targets, soft=soft, compute_dtype=self._dtype)

    @torch.no_grad()
    def measure(self, batch: JointBatch, gather: Gather) -> Measured:
        """As `Objective.measure`.

        The base LM head's loss is the cross-entropy, whatever is trained. Beside it `kl` says how
        far the student is from the original model in the mean, and `agreement` how often its best
        token is the one of the row, which is the original's own where rows are greedy.
        """
        hidden, lm_head = self.trunk(batch), self.student.lm_head
        targets, original = batch.base_targets, self._original(self._teacher, batch, 0)
        kl = lm_head(hidden, targets, soft=original, compute_dtype=self._dtype)
        with gather(lm_head):  # after it was called, which would shard its weights again
            size = lm_head.out_features
            loss, ranks = measure_head(lm_head.prepared(hidden), size, targets, self._dtype)
            heads = measure_heads(
                self.heads, hidden, batch, lm_head.prepared, dtype=self._dtype, gather=gather
            )
        count = float((targets != IGNORE).sum())
        bases = 2 if self._near else 1
        near = kl if self._near else loss
        return replace(
            heads,
            losses=torch.cat([torch.stack([loss, near.double()])[:bases].cpu(), heads.losses]),
            counts=torch.cat([torch.full((bases,), count, dtype=torch.float64), heads.counts]),
            others={
                "kl": (float(kl), count),
                "agreement": (float((ranks == 0).sum()), count),
            },
        )

    def _original(self, teacher: Teacher, batch: JointBatch, index: int) -> SoftTargets:
        """The original model's distributions, for the targets of the base (0) or of a head."""
        places = batch.teachers[index]

        @torch.no_grad()
        def distributions(at: Tensor) -> Tensor:
            return softmax_slices(teacher(batch.states[places[at]]))

        return distributions
