"""Where an answer leaves plain decoding's: how near to a tie the two tokens were.

A forward over several tokens rounds differently from one over a single token. So a lossless method
may say another token only where the target itself hardly prefers one. Anything else is a fault.

Legend: V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from medusa_train.model.language_model import LanguageModel

NEAR = 4.0  # spacings of the dtype, within which two logits are told to be a near-tie

# Prompt id, tokens that both answers share, and the tokens that follow in each: spacings apart
Gap = Callable[[str, Sequence[int], int, int], float]


def gap_of(model: LanguageModel, prompts: Mapping[str, Sequence[int]]) -> Gap:
    """Measures gaps in a plain forward of the target over prompt and shared tokens.

    Args:
        model: the target.
        prompts: token ids by prompt id.
    """

    @torch.inference_mode()
    def gap(prompt_id: str, shared: Sequence[int], one: int, other: int) -> float:
        ids = torch.tensor([[*prompts[prompt_id], *shared]], device=model.device)
        hidden = model.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))
        logits = model.logits(hidden[0, -1:])[0, [one, other]].float()
        return spacings(float(logits[0]), float(logits[1]), model.dtype)

    return gap


def spacings(one: float, other: float, dtype: torch.dtype) -> float:
    """How far two numbers lie apart, in steps of a dtype at their size."""
    size = max(abs(one), abs(other), torch.finfo(dtype).tiny)
    return abs(one - other) / (torch.finfo(dtype).eps * size)
