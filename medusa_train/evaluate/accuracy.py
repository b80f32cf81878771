"""How often each head's best guesses are right, on held-out answers of the model itself.

Legend: P positions, K heads, D hidden size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from medusa_train.data.batch import row_targets
from medusa_train.data.hidden_states import HiddenSource
from medusa_train.data.rows import Row
from medusa_train.decode.medusa import HeadGuesses
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads
from medusa_train.ops.loss import IGNORE
from medusa_train.ops.metrics import MISSED, top_k_hits

_ROWS_AT_ONCE = 8


@torch.inference_mode()
def rank_rows(
    rows: Sequence[Row],
    source: HiddenSource,
    heads: MedusaHeads,
    backbone: Backbone,
    *,
    guesses: int,
) -> list[Tensor]:
    """Rank of the right token among each head's guesses, row by row.

    Only positions from which decoding would really start a step count: from the last prompt
    position on, as long as head 0 has a target.

    Args:
        rows: held-out rows with greedy answers.
        source: of their hidden states.
        heads: in the dtype they will decode in.
        backbone: they belong to.
        guesses: how many of each head's best tokens are looked at.

    Returns:
        For each row ranks from 0, `MISSED` beyond `guesses`, `IGNORE` past the answer's end,
        [K, P].
    """
    guess = HeadGuesses(backbone, heads, [guesses] * len(heads))
    found: list[Tensor] = []
    for batch in _batches(rows):
        for row, states in zip(batch, source(batch), strict=True):
            first = row.answer_start - 1
            targets = row_targets(row, len(heads))[:, first : len(row.ids) - 2]
            hidden = states[first - row.states_start :][: targets.shape[1]]
            tokens = guess.each_head(hidden.to(backbone.dtype))  # [K, P, guesses]
            found.append(_ranks(tokens.cpu(), targets))
    return found


def head_accuracy(ranks: Sequence[Tensor], k: int) -> list[float]:
    """Share of targets among each head's best `k` guesses, by head; 0 where there is no target."""
    hits, counts = top_k_hits(torch.cat(list(ranks), dim=1), k)
    return (hits / counts.clamp(min=1)).tolist()


def _ranks(tokens: Tensor, targets: Tensor) -> Tensor:
    """Place of each target, [K, P], among the guesses, [K, P, guesses]."""
    match = tokens == targets.unsqueeze(-1)
    ranks = torch.where(match.any(dim=-1), match.int().argmax(dim=-1), MISSED)
    return torch.where(targets == IGNORE, IGNORE, ranks)


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield rows[start : start + _ROWS_AT_ONCE]
