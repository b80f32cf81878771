"""The stage `medusa2`: heads and backbone together.

Legend: B rows, T tokens, P positions, L losses, K heads, V vocabulary, D hidden size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.config.schema import Config
from medusa_train.config.training import Medusa2Config
from medusa_train.data.batch import JointBatch, joint_batch, row_targets
from medusa_train.data.hidden_states import HiddenSource, choose_source
from medusa_train.data.rows import Row
from medusa_train.errors import ConfigError
from medusa_train.model.backbone import Backbone, choose_dtype
from medusa_train.model.heads import MedusaHead, MedusaHeads
from medusa_train.model.student import Student
from medusa_train.model.weights import load_heads, save_heads
from medusa_train.ops.loss import IGNORE, softmax_slices
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage, Trained
from medusa_train.train.checkpoint import TrainState
from medusa_train.train.engine import Engine
from medusa_train.train.medusa1 import (
    HEADS_FOLDER,
    fresh_heads,
    head_target_counts,
    measure_heads,
)
from medusa_train.train.objective import (
    Gather,
    Measured,
    Objective,
    ParameterGroup,
    Teacher,
    measure_head,
    products_in,
)
from medusa_train.train.run import make_teacher, read_rows, summarise, train_objective

MERGED_FOLDER = "model"
ADAPTER_FOLDER = "adapter"


class Medusa2Objective(Objective):
    """The base LM head's loss beside the heads', all through the student's hidden states."""

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

        original = partial(_original, self._teacher, batch.states, batch.teachers[0])
        distill = self._settings.base_loss == "self_distill"
        for soft in (original if distill else None, *([original] if self._near else [])):
            yield self.student.lm_head(
                trunk, batch.base_targets, soft=soft, compute_dtype=self._dtype
            )
        for k, (head, targets) in enumerate(zip(self.heads, batch.targets, strict=True)):
            soft = None
            if self._heads_teacher is not None:
                places = batch.teachers[1 + k]
                soft = partial(_original, self._heads_teacher, batch.states, places)
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
        with gather(lm_head):

            def base_logits(states: Tensor) -> Tensor:
                return lm_head(states, compute_dtype=self._dtype)

            def logits(head: MedusaHead, states: Tensor) -> Tensor:
                if head.lm_head is not None:
                    return head.logits(states)
                return base_logits(head.features(states, compute_dtype=self._dtype))

            targets = batch.base_targets
            size = lm_head.out_features
            loss, ranks = measure_head(base_logits, size, hidden, targets, self._dtype)
            kl = lm_head(
                hidden,
                targets,
                soft=partial(_original, self._teacher, batch.states, batch.teachers[0]),
                compute_dtype=self._dtype,
            )
            heads = measure_heads(
                self.heads, hidden, batch, logits, dtype=self._dtype, gather=gather
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


@torch.no_grad()
def _original(teacher: Teacher, states: Tensor, places: Tensor, at: Tensor) -> Tensor:
    """The original model's distributions at some of a batch's positions, [p] -> [p, V].

    Args:
        teacher: logits after hidden states.
        states: of all positions of the rows, [Q, D].
        places: among Q, for each of the batch's positions, [P].
        at: among P, [p].
    """
    return softmax_slices(teacher(states[places[at]]))


def train_medusa2(
    config: Config,
    stage: Stage,
    distill: Path,
    start: Trained | None,
    backbone: Backbone,
    world: World,
) -> dict[str, Any]:
    """Train heads and backbone together.

    They end up in `stage.folder`: `heads`, with a LoRA `adapter`, and with `medusa2.merge` the
    backbone that they belong to as `model`.

    Args:
        config: the whole run.
        stage: opened and unfinished; an interrupted run goes on from its last checkpoint.
        distill: folder of the rows: `train` is learnt, `calibration` is held out.
        start: the heads to go on with; None for fresh ones.
        backbone: on its device; a LoRA is put onto it, so it is of no other use afterwards.
        world: this process among the others; all of them call this.

    Returns:
        What `summarise` gives, and what has become of the backbone on the held-out rows:
        perplexity before and after, KL to the original and greedy agreement.

    Raises:
        MedusaError: whatever a user can change; see the modules that are called.
    """
    settings, device = config.medusa2, backbone.device
    rows, held_out = read_rows(distill, backbone)
    if start is None:
        heads = fresh_heads(config, rows, backbone)
    else:
        heads = load_heads(start.folder, dtype=torch.float32, device=device, backbone=backbone)
        _refuse_other_heads(config, heads, start.folder)
        heads.requires_grad_(True)
    dtype = choose_dtype(settings.optim.compute_dtype, device)
    # Before a LoRA is put onto the LM head
    teacher = make_teacher(backbone, None, dtype)
    heads_teacher = (
        make_teacher(backbone, heads.token_map, dtype) if settings.soft_targets else None
    )
    lora = settings.lora if settings.backbone == "lora" else None
    student = Student(backbone, lora, seed=config.seed)
    source = choose_source(
        settings.hidden_states,
        [*rows, *held_out],
        backbone.hidden_states if lora is None else partial(student.original_states, dtype=dtype),
        num_heads=len(heads),
        device=device,
        stage="medusa2",
    )
    objective = Medusa2Objective(
        student,
        heads,
        source,
        teacher,
        settings,
        compute_dtype=dtype,
        heads_teacher=heads_teacher,
    )
    folder, adapter = stage.folder / HEADS_FOLDER, stage.folder / ADAPTER_FOLDER

    def save(engine: Engine, _: dict[str, Tensor]) -> dict[str, Path]:
        with engine.gathered(objective):
            if world.is_main:
                merged = stage.folder / MERGED_FOLDER
                base = str(merged) if settings.merge else backbone.name
                save_heads(folder, heads, base_model=base)
                if lora is not None:
                    student.save_adapter(adapter)
                if settings.merge:
                    student.save_merged(merged, backbone.tokenizer)
        world.wait()
        return {"heads": folder} if lora is None else {"heads": folder, "adapter": adapter}

    state, trained = train_objective(
        config,
        settings.optim,
        stage,
        objective,
        rows,
        held_out,
        distill=distill,
        frozen=backbone.model,
        device=device,
        world=world,
        save=save,
    )
    return {
        **summarise(state, trained, folder, rows, heads.token_map),
        "tokens_before": 0 if start is None else start.summary["tokens"],
        "backbone": _backbone_report(state),
    }


def _refuse_other_heads(config: Config, heads: MedusaHeads, folder: Path) -> None:
    shape, wanted = heads.shape, config.heads
    reduced = shape.head_vocab_size if shape.lm_head == "reduced" else None
    for name, found, expected in (
        ("num_heads", shape.num_heads, wanted.num_heads),
        ("num_layers", shape.num_layers, wanted.num_layers),
        ("lm_head", shape.lm_head, wanted.lm_head),
        ("vocab_size", reduced, wanted.vocab_size),
    ):
        if found != expected:
            raise ConfigError(
                f"medusa2 starts from the heads in {folder}, which have {name}={found}, but "
                f"heads.{name}={expected}: set heads.{name}={found}, or medusa2.start=fresh"
            )


def _backbone_report(state: TrainState) -> dict[str, float]:
    """What has become of the backbone, on held-out answers of the original model."""
    before, after = state.first_held_out, state.held_out
    return {
        "perplexity_before": math.exp(before["loss"][0]),
        "perplexity": math.exp(after["loss"][0]),
        "kl": after["kl"][0],
        "agreement_before": before["agreement"][0],
        "agreement": after["agreement"][0],
    }
