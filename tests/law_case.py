"""Laws: exact ones by enumeration through transformers' processors, and drawn ones to hold to them.

Legend: B rows, T tokens, V vocabulary, R draws.
"""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_train.decode import Method, Sampling, chooser, generate_batch
from medusa_train.model.language_model import LanguageModel

SIGMAS = 4.0  # what chance may do to a share
DRAWS = 200_000
PROMPT = [1, 3, 0]


def make_small(*, vocab: int = 6, seed: int = 0, spread: float = 1.5, **parts: object):
    """A random model of few ids, whose laws are neither flat nor certain; one row is padding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab + 1,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
                initializer_range=0.6,
                tie_word_embeddings=False,
            )
        )
        model.lm_head.weight.data = spread * torch.randn(vocab + 1, 8)
    model = model.float().eval().requires_grad_(False)
    return LanguageModel(model.model, model.lm_head, **{"valid_ids": vocab, **parts})  # pyright: ignore


def processors(
    sampling: Sampling, *, prompt: int = 0, end_ids: Sequence[int] = ()
) -> LogitsProcessorList:
    """transformers' own, in the order in which it applies them itself."""
    found = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_new_tokens:
        found.append(
            MinNewTokensLengthLogitsProcessor(prompt, sampling.min_new_tokens, list(end_ids))
        )
    if sampling.banned_ids:
        found.append(SuppressTokensLogitsProcessor(sampling.banned_ids))
    if not sampling.greedy:
        found.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            found.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            found.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            found.append(MinPLogitsWarper(sampling.min_p))
    return found


def exact_law(
    model: LanguageModel,
    sampling: Sampling,
    *,
    depth: int,
    prompt: Sequence[int] = PROMPT,
    end_ids: Sequence[int] = (),
) -> Tensor:
    """Of the first tokens of plain sampling, jointly, float64, [V] * depth; nothing ends it."""
    law = torch.ones((), dtype=torch.float64)
    process = processors(sampling, prompt=len(prompt), end_ids=end_ids)
    size = model.vocab_size
    for length in range(depth):
        ids = torch.tensor([[*prompt, *path] for path in product(range(size), repeat=length)])
        with torch.no_grad():
            hidden = model.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))[:, -1]
            scores = process(ids, model.logits(hidden).double())  # pyright: ignore
        law = law.unsqueeze(-1) * scores.softmax(-1).reshape(*law.shape, size)
    return law


def off(found: Tensor, law: Tensor) -> float:
    """How far drawn tokens are off a law, in standard deviations; infinite for impossible ones.

    The worst of each token's share at each place, and of the chi-square over all places together.

    Args:
        found: draws, [R, depth].
        law: [V] * depth.
    """
    draws, places = len(found), range(law.dim())
    counts = torch.zeros_like(law)
    counts.index_put_(found.T.unbind(), torch.ones(draws, dtype=law.dtype), accumulate=True)
    if bool((counts[law == 0] > 0).any()):
        return float("inf")
    worst = 0.0
    for place in places:
        shares = law.movedim(place, 0).flatten(1).sum(1) if len(places) > 1 else law
        alone = torch.bincount(found[:, place], minlength=len(shares))
        sigma = (draws * shares * (1 - shares)).clamp(min=1).sqrt()
        worst = max(worst, float(((alone - draws * shares).abs() / sigma).max()))
    frequent = law * draws >= 25  # chi-square is no law of rarer ones
    squares = ((counts - draws * law) ** 2 / (draws * law))[frequent]
    freedom = max(1, len(squares) - 1)
    return max(worst, float(squares.sum() - freedom) / (2 * freedom) ** 0.5)


def random_numbers(*size: int, seed: int = 0) -> Tensor:
    """In [0, 1), float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*size, generator=generator, dtype=torch.float64)


def first_tokens(
    monkeypatch: pytest.MonkeyPatch,
    method: Method,
    sampling: Sampling,
    *,
    depth: int,
    draws: int = DRAWS,
    prompt: Sequence[int] = PROMPT,
    end_ids: Sequence[int] = (),
) -> Tensor:
    """What a method answers to many equal prompts with unequal seeds, [draws, depth].

    The numbers of all rows come from one generator, which is quicker than one for each.
    """
    monkeypatch.setattr(chooser, "_numbers", lambda seeds, n: random_numbers(len(seeds), 3, n))
    found = generate_batch(
        method,
        [prompt] * draws,
        max_new_tokens=depth,
        end_ids=end_ids,
        sampling=sampling,
    )
    return torch.tensor([answer.ids for answer in found])
