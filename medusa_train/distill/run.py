"""The stage `distill`: the model answers prompts, its answers become the training rows.

Prompts of like length are answered together, in batches that are a function of the settings
alone. Each batch becomes one part on disk, whole or not at all: a run that is killed loses the
batches in flight, and the same command makes just those.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.config.schema import Config, DistillConfig
from medusa_train.data.prompts import EncodedPrompt, encode_prompts, prompts_by_split
from medusa_train.data.rows import LEAD, Row, part_path, part_seconds, read_split, write_part
from medusa_train.decode.batched import Answer, Choose, answer_batch, best_token
from medusa_train.model.backbone import Backbone
from medusa_train.ops.sample import Sampling, draw, probabilities
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage, fingerprint
from medusa_train.track.progress import progress

log = logging.getLogger(__name__)

# What the answers are for: heads and drafts learn from `train`; `calibration` is held out
ANSWERED = ("train", "calibration")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One batch of prompts and the file its rows go to."""

    path: Path
    prompts: list[EncodedPrompt]
    greedy: bool


def distill(config: Config, stage: Stage, backbone: Backbone, world: World) -> dict[str, Any]:
    """Answer the training prompts (as configured) and the calibration prompts (greedily).

    Returns:
        Rows, answer tokens, seconds of computing, finish reasons, and the share of truncated
        answers, by split.
    """
    parts = plan_parts(config, stage.folder, backbone)
    log.info(
        "distill: %d prompts, %d answered before",
        sum(len(part.prompts) for part in parts),
        sum(len(part.prompts) for part in parts if part.path.exists()),
    )
    # Whose part it is must not depend on what is there: another process may be writing already
    mine = [part for part in parts[world.rank :: world.size] if not part.path.exists()]
    total = sum(len(part.prompts) for part in mine)
    tokens, begin = 0, time.monotonic()
    with progress("distill", total, is_main=world.is_main) as meter:
        for part in mine:
            tokens += _answer_part(part, config, backbone)
            speed = tokens / (time.monotonic() - begin)
            meter.advance(len(part.prompts), note=f"{speed:.0f} tokens/s")
    world.wait()
    return summarise(stage.folder)


def plan_parts(config: Config, folder: Path, backbone: Backbone) -> list[_Part]:
    """All batches of the stage, in order: prompts of like length together."""
    splits = prompts_by_split(config.prompts)
    parts: list[_Part] = []
    for split in ANSWERED:
        encoded = encode_prompts(
            splits[split],
            backbone,
            system=config.prompts.system,
            max_new_tokens=config.distill.max_new_tokens,
        )
        encoded.sort(key=lambda e: (len(e.ids), e.prompt.id))
        size = config.distill.batch_size
        for index, start in enumerate(range(0, len(encoded), size)):
            parts.append(
                _Part(
                    path=part_path(folder / split, index),
                    prompts=encoded[start : start + size],
                    greedy=split != "train",
                )
            )
    return parts


def summarise(folder: Path) -> dict[str, Any]:
    """Counts over all rows of a finished stage."""
    summary: dict[str, Any] = {}
    for split in ANSWERED:
        rows = read_split(folder / split)
        reasons = Counter(row.finish_reason for row in rows)
        summary[split] = {
            "rows": len(rows),
            "tokens": sum(len(row.answer_ids) for row in rows),
            "prompt_tokens": sum(row.answer_start for row in rows),
            "seconds": round(part_seconds(folder / split), 3),
            "finish_reasons": dict(sorted(reasons.items())),
            "truncated_share": round(reasons["length"] / len(rows), 4),
        }
    return summary


def _answer_part(part: _Part, config: Config, backbone: Backbone) -> int:
    begin = time.perf_counter()
    settings = config.distill
    answers = answer_batch(
        backbone,
        [e.ids for e in part.prompts],
        max_new_tokens=settings.max_new_tokens,
        end_ids=backbone.end_ids,
        choose=_chooser(part, settings, config.seed),
        lead=LEAD - 1 if settings.hidden_states else None,
    )
    rows = [_row(e, a, backbone) for e, a in zip(part.prompts, answers, strict=True)]
    hidden = [a.hidden for a in answers if a.hidden is not None] or None
    write_part(part.path, rows, hidden, seconds=time.perf_counter() - begin)
    return sum(len(answer.ids) for answer in answers)


def _chooser(part: _Part, settings: DistillConfig, seed: int) -> Choose:
    sampling = Sampling(temperature=settings.temperature, top_p=settings.top_p)
    if part.greedy or sampling.greedy:
        return best_token
    uniform = row_numbers([e.prompt.id for e in part.prompts], settings.max_new_tokens, seed)

    def choose(logits: Tensor, rows: list[int], step: int) -> Tensor:
        numbers = uniform[rows, step].to(logits.device)
        return draw(probabilities(logits, sampling), numbers)

    return choose


def row_numbers(ids: Sequence[str], length: int, seed: int) -> Tensor:
    """Random numbers in [0, 1) of each row, by its id and the seed alone, [rows, length]."""
    rows = []
    for row in ids:
        generator = torch.Generator().manual_seed(int(fingerprint([seed, row])[:15], 16))
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def _row(encoded: EncodedPrompt, answer: Answer, backbone: Backbone) -> Row:
    return Row(
        id=encoded.prompt.id,
        kind=encoded.prompt.kind,
        prompt=encoded.prompt.text,
        answer=backbone.decode(answer.ids),
        ids=encoded.ids + answer.ids,
        mask=[False] * len(encoded.ids) + [True] * len(answer.ids),
        finish_reason=answer.finish_reason,
    )
