"""SmolLM2-135M-Instruct in fp32 on prompts of the shipped set: every method, many trees."""

import os

import pytest
import torch
from decoding_case import (
    DEPTH,
    TREES,
    OracleHeads,
    expected_acceptances,
    grown,
    make_tree,
    mixed_ranks,
)
from transformers import AutoModelForCausalLM

from medusa_train.data.prompt_set import shipped_prompts
from medusa_train.decode import DraftModel, Medusa, Plain, generate
from medusa_train.decode.batched import answer_batch
from medusa_train.model.draft import cut_draft
from medusa_train.model.heads import HeadsShape, MedusaHeads
from medusa_train.model.language_model import LanguageModel
from medusa_train.model.vocabulary import choose_token_map

pytestmark = pytest.mark.slow

PROMPTS = 20
LENGTH = 24
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
    """What `transformers.generate` answers, and goes on to say."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = smollm2.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH + BEYOND,
            do_sample=False,
            eos_token_id=sorted(smollm2.end_ids),
            pad_token_id=smollm2.tokenizer.pad_token_id,
        )
        answers.append(found[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def truth(continued):
    return [answer[:LENGTH] for answer in continued]


@pytest.fixture(scope="module")
def oracles(smollm2, prompts, continued):
    """For each prompt, heads that hold the true tokens at mixed ranks, and those ranks."""
    pairs = []
    for seed, (prompt, answer) in enumerate(zip(prompts, continued, strict=True)):
        text = prompt + answer + [0] * (LENGTH + BEYOND - len(answer))
        ranks = mixed_ranks(len(text), seed=seed)
        pairs.append((OracleHeads(smollm2, text, ranks), ranks))
    return pairs


@pytest.fixture(scope="module")
def untrained(smollm2, truth):
    """Heads that equal the LM head, over the tokens of the answers and some more."""
    token_map = choose_token_map(truth, size=HEAD_VOCABULARY, vocab_size=smollm2.valid_ids)
    shape = HeadsShape(
        num_heads=DEPTH,
        num_layers=1,
        lm_head="reduced",
        hidden_size=smollm2.hidden_size,
        vocab_size=smollm2.vocab_size,
        head_vocab_size=HEAD_VOCABULARY,
    )
    heads = MedusaHeads(shape, token_map)
    heads.copy_lm_head(smollm2.lm_head.weight)
    return heads


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
            laid_out, ranks, prompt=len(prompt), length=length
        )
        depths.update(found.accepted)
    assert depths == set(range(len(laid_out.ranks_by_depth) + 1))


def test_medusa_with_untrained_heads(smollm2, prompts, truth, untrained):
    tree = make_tree(grown(14), max_rank=HEAD_VOCABULARY)
    found = answers(Medusa(smollm2, untrained, tree), prompts, smollm2.end_ids)
    assert [answer.ids for answer in found] == truth


def test_all_prompts_at_once(smollm2, prompts, truth):
    found = answer_batch(smollm2, prompts, max_new_tokens=LENGTH, end_ids=smollm2.end_ids)
    assert [answer.ids for answer in found] == truth


def test_a_dequantised_model_is_saved_as_a_plain_one(smollm2, tmp_path):
    smollm2.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, smollm2.model(input_ids=ids).logits)
