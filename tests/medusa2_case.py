"""A Medusa-2 objective on a tiny backbone, for tests."""

from dataclasses import replace
from functools import partial

import torch
from training_case import CPU, make_backbone, make_config, make_heads

from medusa_train.config.training import Medusa2Config
from medusa_train.data.hidden_states import online_source
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.student import Student
from medusa_train.train.joint import Medusa2Objective
from medusa_train.train.run import make_teacher


def make_settings(**changes: object) -> Medusa2Config:
    """A LoRA of rank 4 without dropout, in float32."""
    settings = make_config("medusa2.lora.rank=4", "medusa2.lora.alpha=8.0").medusa2
    return replace(settings, **changes)  # pyright: ignore


def make_objective(
    model: Backbone | None = None,
    *,
    heads: MedusaHeads | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> Medusa2Objective:
    """Untrained heads and a LoRA that changes nothing yet."""
    backbone, settings = model or make_backbone(), make_settings(**changes)
    heads = heads or make_heads(backbone)
    teacher = make_teacher(backbone, None, dtype)
    heads_teacher = make_teacher(backbone, heads.token_map, dtype)
    lora = settings.lora if settings.backbone == "lora" else None
    student = Student(backbone, lora, seed=0)
    forward = (
        backbone.hidden_states if lora is None else partial(student.original_states, dtype=dtype)
    )
    source = online_source(forward, CPU)
    return Medusa2Objective(
        student,
        heads,
        source,
        teacher,
        settings,
        compute_dtype=dtype,
        heads_teacher=heads_teacher if settings.soft_targets else None,
    )


def disturb(module: torch.nn.Module, *, seed: int = 0, by: float = 0.1) -> None:
    """Add noise to everything that is trained, so that no term is zero by chance."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += by * torch.randn(parameter.shape, generator=generator)


def logits_of(model, rows) -> list[torch.Tensor]:
    """Of each row alone, [T, V]."""
    return [model(input_ids=torch.tensor([row.ids])).logits[0].detach() for row in rows]
