"""Final-norm hidden states of rows: stored by `distill`, or from a forward of the backbone.

Legend: B rows, T tokens, P positions, K heads, D hidden size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa_train.data.rows import LEAD, HiddenFiles, Row, has_hidden
from medusa_train.errors import ConfigError

# For each row the states of positions row.states_start ... T - 2, each [P, D]
HiddenSource = Callable[[Sequence[Row]], list[Tensor]]


# Final-norm states of right-padded ids under an attention mask, [B, T], [B, T] -> [B, T, D]
HiddenForward = Callable[[Tensor, Tensor], Tensor]


def choose_source(
    mode: str,
    rows: Sequence[Row],
    forward: HiddenForward,
    *,
    num_heads: int,
    device: torch.device,
    stage: str,
) -> HiddenSource:
    """The stored states where the mode asks for or allows them, else a forward of the backbone.

    Args:
        mode: `cached`, `online`, or `auto`: cached where every row has stored states.
        rows: all rows that will be asked for.
        forward: of the backbone.
        num_heads: K; stored states reach back far enough for `LEAD - 1` heads.
        device: of the states.
        stage: for the message.

    Raises:
        ConfigError: if `cached` is asked for and cannot be had.
    """
    usable = has_hidden(rows) and num_heads < LEAD
    if mode == "cached" and not usable:
        why = "some rows have none" if num_heads < LEAD else f"they serve up to {LEAD - 1} heads"
        raise ConfigError(
            f"{stage}.hidden_states=cached with heads.num_heads={num_heads}, but {why}: use "
            f"{stage}.hidden_states=online, or distill with distill.hidden_states=true"
        )
    if usable and mode != "online":
        return cached_source(device)
    return online_source(forward, device)


def cached_source(device: torch.device) -> HiddenSource:
    """States as stored beside the rows."""
    files = HiddenFiles()
    return lambda rows: [files(row).to(device) for row in rows]


def online_source(forward: HiddenForward, device: torch.device) -> HiddenSource:
    """States from one padded forward of the backbone; a row's do not depend on the others."""

    def states(rows: Sequence[Row]) -> list[Tensor]:
        with torch.no_grad():
            hidden = forward(*padded(rows, device))
        return [
            hidden[b, row.states_start : len(row.ids) - 1].clone() for b, row in enumerate(rows)
        ]

    return states


def padded(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids and attention mask of rows, both [B, T]. Padding is known by position."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    attend = torch.zeros((len(rows), longest), dtype=torch.bool)
    for b, row in enumerate(rows):
        ids[b, : len(row.ids)] = torch.tensor(row.ids)
        attend[b, : len(row.ids)] = True
    return ids.to(device), attend.to(device)
