"""Whole methods answer by the law of plain sampling, and faults put into them are seen.

The law of the first three tokens of a small model, enumerated through transformers' processors.
"""

import pytest
import torch
from law_case import SIGMAS, exact_law, first_tokens, make_small, off
from torch import nn

from medusa_train.decode import DraftModel, Lookup, Medusa, Plain, Sampling, method
from medusa_train.decode.chooser import DRAW, GUESS
from medusa_train.model.heads import untrained_heads
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.accept import reject
from medusa_train.ops.sample import draw
from medusa_train.ops.tree import build_tree

DEPTH, DRAWS = 3, 20_000
END = 2
PROMPT = [3, 0, 1, 2, 4, 5, 1, 3]  # each id has been followed by another: lookup always guesses
TARGET, DRAFT = make_small(seed=2, spread=0.7), make_small(seed=3, spread=0.5)

PENALTIES = Sampling(
    temperature=1.0, repetition_penalty=1.7, min_new_tokens=DEPTH, banned_ids=(4,), top_k=4
)
SETTINGS = {
    "temperature 1": Sampling(temperature=1.0),
    "temperature 0.6": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.0, top_k=3),
    "top-p": Sampling(temperature=1.0, top_p=0.75),
    "min-p": Sampling(temperature=1.0, min_p=0.25),
    "all": Sampling(temperature=1.3, top_k=5, top_p=0.95, min_p=0.1),
    "penalties": PENALTIES,
}


def draft_of(*ids):
    """Guesses these ids only."""
    head = nn.Linear(8, len(ids), bias=False).requires_grad_(False)
    head.weight.data = DRAFT.lm_head.weight[list(ids)]  # pyright: ignore
    return LanguageModel(DRAFT.decoder, head, token_map=torch.tensor(ids))


def medusa(kind=Medusa):
    heads = untrained_heads(TARGET.lm_head.weight, num_heads=2)  # pyright: ignore
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    choices = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 2)]
    return kind(TARGET, heads, build_tree(choices, num_heads=2, max_rank=6))


METHODS = {
    "plain": lambda: Plain(TARGET),
    "draft": lambda: DraftModel(TARGET, DRAFT, gamma=2),
    "adaptive draft": lambda: DraftModel(TARGET, DRAFT, gamma=1, adaptive=True),
    "draft of fewer ids": lambda: DraftModel(TARGET, draft_of(0, 2, 3, 5), gamma=2),
    # both are held back by the penalties, which leaves it nothing to guess
    "draft of two ids": lambda: DraftModel(TARGET, draft_of(2, 4), gamma=2),
    "draft that is the target": lambda: DraftModel(TARGET, TARGET, gamma=2),
    "medusa": medusa,
    "lookup": lambda: Lookup(TARGET, gamma=2, longest_ngram=1),
}


def off_the_law(monkeypatch, made, setting, *, depth=DEPTH, draws=DRAWS):
    sampling = SETTINGS[setting]
    ends = [END] if sampling.min_new_tokens else []
    case = {"depth": depth, "prompt": PROMPT, "end_ids": ends}
    found = first_tokens(monkeypatch, made, sampling, draws=draws, **case)
    return off(found, exact_law(TARGET, sampling, **case))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("setting", ["all", "penalties"])
def test_every_method(monkeypatch, name, setting):
    assert off_the_law(monkeypatch, METHODS[name](), setting) <= SIGMAS


@pytest.mark.parametrize("name", ["draft", "medusa"])
@pytest.mark.parametrize("setting", ["temperature 1", "temperature 0.6", "top-k", "top-p", "min-p"])
def test_every_setting(monkeypatch, name, setting):
    assert off_the_law(monkeypatch, METHODS[name](), setting) <= SIGMAS


@pytest.mark.parametrize("setting", ["temperature 1", "top-p"])
def test_rows_with_unequal_numbers_of_guesses(monkeypatch, setting):
    """After its first step an adaptive draft guesses three tokens for some rows, one for others."""
    method = METHODS["adaptive draft"]()
    assert off_the_law(monkeypatch, method, setting, depth=4) <= SIGMAS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft", "adaptive draft", "medusa", "lookup"])
def test_many_draws(monkeypatch, name):
    assert off_the_law(monkeypatch, METHODS[name](), "all", draws=10 * DRAWS) <= SIGMAS


# Faults


class BestTokenDraft(DraftModel):
    """Guesses its best token, though its whole law is handed on."""

    def _next(self, hidden, guesses, laws):
        super()._next(hidden, guesses, laws)
        return laws[-1].argmax(-1)


class OneSidedDraft(DraftModel):
    """Guesses by the settings, but hands on its law as it is without them."""

    def _next(self, hidden, guesses, laws):
        token = super()._next(hidden, guesses, laws)
        laws[-1] = self._draft.logits_over(hidden, self.model.vocab_size).softmax(-1)
        return token


class PerPathMedusa(Medusa):
    """Decides at a node once for each path through it, and takes the longest that is accepted."""

    def _verify(self, ids, hidden, guesses):
        logits, lead = self.model.logits(hidden), self._lead(ids, guesses.tree)
        laws, tree, found = self._chooser.laws(logits, *lead), guesses.tree, []
        generator = torch.Generator().manual_seed(ids.shape[0])
        for leaf, below in enumerate(tree.children):
            if not below:
                uniform = torch.rand(laws.shape[:2], generator=generator, dtype=torch.float64)
                alone = [[c for c in some if c in tree.trails[leaf]] for some in tree.children]
                rows = zip(ids.tolist(), draw(laws, uniform).tolist(), strict=True)
                found.append([(method.follow(alone, *row), row[1]) for row in rows])
        best = [max(row, key=lambda pair: len(pair[0])) for row in zip(*found, strict=True)]
        paths, following = [path for path, _ in best], [drawn for _, drawn in best]
        return paths, method.blocks_of(paths, ids.tolist(), following)


class FreshDrawMedusa(Medusa):
    """Draws once to decide and once more for what follows."""

    def _verify(self, ids, hidden, guesses):
        paths, blocks = super()._verify(ids, hidden, guesses)
        lead = self._lead(ids, guesses.tree)
        laws = self._chooser.laws(self.model.logits(hidden), *lead)
        again = draw(laws, self._chooser.numbers(GUESS, lead[1])).tolist()
        for path, block, row in zip(paths, blocks, again, strict=True):
            block[-1] = row[path[-1]]
        return paths, blocks


class ReusedNumbersDraft(DraftModel):
    """Decides on a guess by the very number that it was drawn with."""

    def _verify_drawn(self, ids, hidden, guesses, laws):
        numbers = self._chooser.numbers
        self._chooser.numbers = lambda stream, depth: numbers(
            stream if stream == DRAW else GUESS, depth
        )
        found = super()._verify_drawn(ids, hidden, guesses, laws)
        self._chooser.numbers = numbers
        return found


FAULTS = {
    "the draft takes its best token": ("top-k", lambda: BestTokenDraft(TARGET, DRAFT, gamma=2)),
    "one-sided": ("temperature 0.6", lambda: OneSidedDraft(TARGET, DRAFT, gamma=2)),
    "one-sided top-p": ("top-p", lambda: OneSidedDraft(TARGET, DRAFT, gamma=2)),
    "a number used twice": (
        "temperature 1",
        lambda: ReusedNumbersDraft(TARGET, DRAFT, gamma=2),
    ),
    "a draw per path": ("temperature 1", lambda: medusa(PerPathMedusa)),
    "a fresh draw": ("temperature 1", lambda: medusa(FreshDrawMedusa)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(monkeypatch, fault):
    setting, make = FAULTS[fault]
    assert off_the_law(monkeypatch, make(), setting) > 2 * SIGMAS


@pytest.mark.parametrize("setting", ["temperature 1", "top-p"])
def test_softmax_of_the_rest_is_seen(monkeypatch, setting):
    def faulty(target, draft, guesses, accept, again):
        accepted, _ = reject(target, draft, guesses, accept, again)
        rest = (target[:, :-1] - draft).clamp(min=0).softmax(-1)
        return accepted, draw(torch.cat([rest, target[:, -1:]], 1), again)

    monkeypatch.setattr(method, "reject", faulty)
    assert off_the_law(monkeypatch, METHODS["draft"](), setting) > 2 * SIGMAS
