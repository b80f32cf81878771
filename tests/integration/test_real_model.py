"""SmolLM2-135M-Instruct in fp32 on prompts of the shipped set: every method, many trees."""

import os

import pytest
import torch
from decoding_case import (
    DEPTH,
    TREES,
    OracleHeads,
    expected_acceptances,
    make_tree,
    mixed_ranks,
)

from medusa_train.data.prompt_set import shipped_prompts
from medusa_train.decode import DraftModel, Medusa, Plain, generate
from medusa_train.model.draft import cut_draft
from medusa_train.model.language_model import LanguageModel

pytestmark = pytest.mark.slow

PROMPTS = 20
LENGTH = 16
BEYOND = DEPTH + 1  # what heads may guess at when the answer is already cut
HEAD_VOCABULARY = 2000


@pytest.fixture(scope="module", autouse=True)
def _all_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(smollm2):
    """The shortest, to be quick."""
    encoded = [smollm2.encode_prompt(prompt.text, None) for prompt in shipped_prompts()[:80]]
    return sorted(encoded, key=len)[:PROMPTS]


@pytest.fixture(scope="module")
def continued(smollm2, prompts):
    """What `transformers.generate` says, ends or not."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = smollm2.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH + BEYOND,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=smollm2.tokenizer.pad_token_id,
        )
        answers.append(found[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def truth(smollm2, continued):
    """The answers up to their first end."""
    answers = []
    for said in continued:
        ends = [place + 1 for place, token in enumerate(said) if token in smollm2.end_ids]
        answers.append(said[: min([LENGTH, *ends])])
    return answers


@pytest.fixture(scope="module")
def oracles(smollm2, prompts, continued):
    """For each prompt, heads that hold the true tokens at mixed ranks, and those ranks."""
    pairs = []
    for seed, (prompt, answer) in enumerate(zip(prompts, continued, strict=True)):
        text = prompt + answer
        ranks = mixed_ranks(len(text), seed=seed)
        pairs.append((OracleHeads(smollm2, text, ranks), ranks))
    return pairs


def answers(method, prompts, end_ids):
    return [generate(method, p, max_new_tokens=LENGTH, end_ids=end_ids) for p in prompts]


def test_the_prompts_are_many_and_answered_in_many_ways(prompts, truth):
    assert len(prompts) == PROMPTS
    assert len({tuple(answer[:8]) for answer in truth}) > PROMPTS / 2


def test_plain(smollm2, prompts, truth):
    found = answers(Plain(smollm2), prompts, smollm2.end_ids)
    assert [answer.ids for answer in found] == truth


def test_draft_model(smollm2, prompts, truth):
    """The draft is the first three layers of the target."""
    cut = cut_draft(smollm2, 3, None, device=smollm2.device)
    draft = LanguageModel(cut.decoder, cut.lm_head, valid_ids=smollm2.valid_ids)
    found = answers(DraftModel(smollm2, draft, gamma=3), prompts, smollm2.end_ids)
    assert [answer.ids for answer in found] == truth


@pytest.mark.parametrize("tree", TREES)
def test_medusa_with_heads_that_are_often_right(smollm2, prompts, truth, oracles, tree):
    laid_out, depths = make_tree(TREES[tree]), set()
    for prompt, expected, (heads, ranks) in zip(prompts, truth, oracles, strict=True):
        method = Medusa(smollm2, heads, laid_out)
        found = generate(method, prompt, max_new_tokens=LENGTH, end_ids=smollm2.end_ids)
        assert found.ids == expected
        length = len(expected)
        assert found.accepted == expected_acceptances(
            laid_out,
            ranks,
            prompt=len(prompt),
            length=length,
            stopped=expected[-1] in smollm2.end_ids,
        )
        depths.update(found.accepted)
    assert depths == set(range(len(laid_out.ranks_by_depth) + 1))
