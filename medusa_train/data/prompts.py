"""The prompts of a run by split: the shipped ones, or a user's JSONL file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_train.config.schema import PromptsConfig
from medusa_train.data.prompt_set import KINDS, SPLITS, Prompt, prompt_id, shipped_prompts, split_of
from medusa_train.errors import DataError

if TYPE_CHECKING:  # transformers is slow to import, and a missing file is told without
    from medusa_train.model.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt and its exact token ids, template included."""

    prompt: Prompt
    ids: list[int]


def prompts_by_split(config: PromptsConfig) -> dict[str, list[Prompt]]:
    """Prompts of each split, in a fixed order that mixes what they are about.

    Raises:
        DataError: if the file is missing, empty or malformed, or a split comes out empty.
    """
    prompts = shipped_prompts() if config.path is None else read_prompts(Path(config.path))
    splits: dict[str, list[Prompt]] = {name: [] for name in SPLITS}
    for prompt in prompts:
        split = split_of(prompt.group, calibration=config.calibration_share, test=config.test_share)
        splits[split].append(prompt)
    limits = (config.max_train, config.max_calibration, config.max_test)
    for name, limit in zip(SPLITS, limits, strict=True):
        if not splits[name]:
            raise DataError(
                f"none of the {len(prompts)} prompts falls into the {name} split; give more "
                "prompts, or raise prompts.calibration_share and prompts.test_share"
            )
        splits[name] = splits[name][:limit]
    return splits


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file: `{"prompt": "...", "kind": "..."}` a line, `kind` optional.

    Raises:
        DataError: naming the file and the line.
    """
    if not path.is_file():
        raise DataError(f"prompts.path={path}: no such file")
    found: dict[str, Prompt] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"prompts.path={path} is not UTF-8 text ({error}); convert it") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = _parse(line, f"{path}, line {number}")
            found.setdefault(prompt.group, prompt)
    if not found:
        raise DataError(f'prompts.path={path} is empty; expected lines like {{"prompt": "..."}}')
    return sorted(found.values(), key=lambda prompt: prompt.id.rsplit("-", 1)[-1])


def encode_prompts(
    prompts: list[Prompt], backbone: "Backbone", *, system: str | None, max_new_tokens: int
) -> list[EncodedPrompt]:
    """Token ids of prompts.

    Raises:
        DataError: if some leave no room for an answer of `max_new_tokens` in the context.
    """
    encoded = [EncodedPrompt(prompt=p, ids=backbone.encode_prompt(p.text, system)) for p in prompts]
    limit = backbone.max_positions - max_new_tokens
    long = [e for e in encoded if len(e.ids) > limit]
    if long:
        worst = max(long, key=lambda e: len(e.ids))
        raise DataError(
            f"{len(long)} prompt(s) are too long: {worst.prompt.id} has {len(worst.ids)} tokens, "
            f"and a context of {backbone.max_positions} with answers of {max_new_tokens} leaves "
            f"{limit}; shorten or drop them, or lower max_new_tokens"
        )
    return encoded


def _parse(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error})") from None
    text = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f'{where}: expected {{"prompt": "some text"}}, found {line[:80]}')
    kind = record.get("kind", "other")
    if not isinstance(kind, str):
        raise DataError(f"{where}: kind must be text (such as {KINDS[0]}), found {kind!r}")
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Prompt(id=prompt_id(kind, text), kind=kind, text=text, group=prompt_id("", text))
