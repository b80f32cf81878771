"""Answering many prompts at once, plainly: for distillation, where throughput counts.

What all prompts begin with, such as a template's system turn, is read once for all rows. The rest
of each prompt is padded on the left, so that all rows end at the same place. Finished rows leave
the batch.

Legend: B rows, T new tokens of each row, S capacity, V vocabulary, D hidden size.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.decode.cache import DecodeCache
from medusa_train.decode.forward import layer_windows
from medusa_train.decode.stopping import FinishReason
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.sample import best_ids

_SHRINK_AT = 0.8  # finished rows leave once the rest is at most this share of the batch

# Logits of the rows at hand [B, V], their places in the batch, and the step: ids [B]
Choose = Callable[[Tensor, list[int], int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row's answer."""

    ids: list[int]
    finish_reason: FinishReason
    # Final-norm states of the last `lead` prompt positions before the last one, the last one, and
    # all answer tokens but the last: [positions, D]; None unless asked for
    hidden: Tensor | None


def best_token(logits: Tensor, rows: list[int], step: int) -> Tensor:
    """Greedy choice."""
    return best_ids(logits)


@torch.inference_mode()
def answer_batch(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    choose: Choose = best_token,
    lead: int | None = None,
) -> list[Answer]:
    """Answer prompts together; a row's answer depends on the others only by rounding.

    Args:
        model: decodes.
        prompts: token ids, none empty.
        max_new_tokens: at most so many each.
        end_ids: ids that end an answer and are kept as its last token.
        choose: picks the next tokens.
        lead: keep hidden states, from this many positions before the last of the prompt on.
    """
    batch = _Batch(model, prompts, max_new_tokens, apart=1 + (lead or 0))
    answers: list[list[int]] = [[] for _ in prompts]
    states: list[list[Tensor]] = [[] for _ in prompts]
    reasons: list[FinishReason] = ["length"] * len(prompts)
    hidden = batch.prefill()
    if lead is not None:
        for row, prompt in enumerate(prompts):
            states[row].append(hidden[row, -min(len(prompt), lead + 1) :].clone())
    last = hidden[:, -1]
    for step in range(max_new_tokens):
        rows = batch.rows
        chosen = choose(model.logits(last), rows, step)
        finished = []
        for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            if row in batch.finished:
                continue
            answers[row].append(token)
            if token in end_ids:
                reasons[row] = "stop"
                finished.append(place)
        batch.finish(finished)
        if batch.is_empty or step == max_new_tokens - 1:
            break
        last = batch.step(chosen)
        if lead is not None:
            for place, row in enumerate(batch.rows):
                if row not in batch.finished:
                    states[row].append(last[place].unsqueeze(0).clone())
    return [
        Answer(
            ids=answers[row],
            finish_reason=reasons[row],
            hidden=torch.cat(states[row]) if lead is not None else None,
        )
        for row in range(len(prompts))
    ]


class _Batch:
    """Rows on their way through the model, with their cache and mask."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        *,
        apart: int,
    ) -> None:
        """Lay out the rows; at least the last `apart` tokens of a prompt are read row by row."""
        shared = shared_length(prompts, apart=apart)
        rests = [prompt[shared:] for prompt in prompts]
        longest = max(len(rest) for rest in rests)
        capacity = shared + longest + max_new_tokens
        self.rows = list(range(len(prompts)))
        self.finished: set[int] = set()
        self._model = model
        self._windows = layer_windows(model)
        rows = 1 if shared else len(prompts)
        self._cache = DecodeCache(model.config.num_hidden_layers, capacity, rows=rows)
        self._shared = torch.tensor([prompts[0][:shared]], dtype=torch.long)
        self._rests = torch.zeros((len(prompts), longest), dtype=torch.long)
        real = torch.ones((len(prompts), capacity), dtype=torch.bool)
        places = torch.arange(capacity).repeat(len(prompts), 1)
        for row, rest in enumerate(rests):
            pads = longest - len(rest)
            self._rests[row, pads:] = torch.tensor(rest)
            real[row, shared : shared + pads] = False
            places[row, shared:] -= pads
        self._real = real.to(model.device)  # False where padded, [B, S]
        self._places = places.clamp(min=0).to(model.device)  # position ids, [B, S]

    @property
    def is_empty(self) -> bool:
        return len(self.finished) >= len(self._rests)

    def prefill(self) -> Tensor:
        """Hidden states of all prompts behind what they share, [B, T, D]."""
        if self._shared.shape[1]:
            real, places = self._real, self._places
            self._real, self._places = real[:1], places[:1]
            self._forward(self._shared.to(self._model.device))
            self._real, self._places = real, places
            self._cache.repeat_rows(len(self.rows))
        return self._forward(self._rests.to(self._model.device))

    def finish(self, places: list[int]) -> None:
        """These rows of the batch at hand are done."""
        self.finished.update(self.rows[place] for place in places)

    def step(self, chosen: Tensor) -> Tensor:
        """Feed the chosen tokens, [B]; the hidden states of the rows still there, [B', D]."""
        alive = [place for place, row in enumerate(self.rows) if row not in self.finished]
        if len(alive) <= _SHRINK_AT * len(self.rows):
            keep = torch.tensor(alive, device=chosen.device)
            chosen, self._real, self._places = chosen[keep], self._real[keep], self._places[keep]
            self._cache.keep_rows(alive)
            self.rows = [self.rows[place] for place in alive]
        return self._forward(chosen.unsqueeze(1))[:, 0]

    def _forward(self, ids: Tensor) -> Tensor:
        """Read new tokens of every row, [B, T] -> [B, T, D]."""
        begin = self._cache.longest
        end = begin + ids.shape[1]
        positions = self._places[:, begin:end]
        mask = self._masks(positions, end)
        hidden = self._model.forward(ids, positions=positions, mask=mask, cache=self._cache)
        self._cache.commit([range(ids.shape[1])] * len(ids))
        return hidden

    def _masks(self, positions: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """Additive masks by layer type, [B, 1, T, S]."""
        distance = positions.unsqueeze(2) - self._places[:, None, :end]
        masks = {}
        for kind, window in self._windows.items():
            sees = self._real[:, None, :end] & (distance >= 0) & (distance < window)
            lowest = torch.finfo(self._model.dtype).min
            mask = torch.zeros(sees.shape, dtype=self._model.dtype, device=sees.device)
            masks[kind] = mask.masked_fill_(~sees, lowest).unsqueeze(1)
        return masks.get("", masks)


def shared_length(prompts: Sequence[list[int]], *, apart: int) -> int:
    """How many tokens all prompts begin with, leaving each its last `apart` (as far as it has)."""
    if len(prompts) == 1:
        return 0
    first, last = min(prompts), max(prompts)  # the two that part soonest
    most = max(0, min(len(prompt) for prompt in prompts) - apart)
    alike = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return min(most, next(alike, most))
