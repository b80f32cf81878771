import pytest
import torch
from decoding_case import answer_of, noisy_draft, random_ids, transformers_greedy

from medusa_train.decode import DraftModel
from medusa_train.model.draft import cut_draft
from medusa_train.model.language_model import LanguageModel

PROMPT = random_ids(10)
LENGTH = 40
NOISES = [0.0, 0.005, 0.01, 0.02, 0.05]


@pytest.fixture(scope="module")
def truth(tiny):
    return transformers_greedy(tiny, PROMPT, LENGTH + 10)


def as_language_model(draft, valid_ids=259):
    return LanguageModel(
        draft.decoder, draft.lm_head, valid_ids=valid_ids, token_map=draft.token_map
    )


def expected_acceptances(draft, truth, gamma):
    """What a draft that rereads the whole text at each guess would get accepted."""
    accepted, emitted = [], 1
    with torch.no_grad():
        while emitted < LENGTH:
            text, right = PROMPT + truth[:emitted], 0
            while right < gamma:
                ids = torch.tensor([text])
                hidden = draft.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))
                guess = int(draft.best(hidden[0, -1]))
                if guess != truth[emitted + right]:
                    break
                text, right = [*text, guess], right + 1
            accepted.append(right)
            emitted += right + 1
    return accepted


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_guesses_are_those_of_a_draft_that_rereads_everything(tiny, truth, gamma, noise):
    draft = noisy_draft(tiny, noise)
    found = answer_of(DraftModel(tiny, draft, gamma=gamma), PROMPT, LENGTH)
    assert found.ids == truth[:LENGTH]
    assert found.accepted == expected_acceptances(draft, truth, gamma)
    if noise == 0.0:
        assert set(found.accepted) == {gamma}


def test_those_drafts_are_rejected_at_every_place(tiny, truth):
    counts = [expected_acceptances(noisy_draft(tiny, noise), truth, 5) for noise in NOISES]
    assert {accepted for some in counts for accepted in some} == set(range(6))


def test_the_first_layers_of_the_target(tiny, truth):
    draft = cut_draft(tiny, 1, None, device=tiny.device)
    found = answer_of(DraftModel(tiny, as_language_model(draft), gamma=3), PROMPT, LENGTH)
    assert found.ids == truth[:LENGTH]


def test_a_reduced_vocabulary_guesses_only_its_own_tokens(tiny, truth):
    known = sorted(set(truth[:LENGTH:2]))
    draft = cut_draft(tiny, 2, torch.tensor(known), device=tiny.device)
    method = DraftModel(tiny, as_language_model(draft), gamma=3)
    found = answer_of(method, PROMPT, LENGTH)
    assert found.ids == truth[:LENGTH]
    # all layers are there, so a guess is right wherever the token is known
    assert found.accepted == expected_by_membership(truth, set(known), gamma=3)
    assert set(found.accepted) >= {0, 3}


def expected_by_membership(truth, known, *, gamma):
    accepted, emitted = [], 1
    while emitted < LENGTH:
        ahead = [token in known for token in truth[emitted : emitted + gamma]]
        accepted.append(ahead.index(False) if False in ahead else gamma)
        emitted += accepted[-1] + 1
    return accepted


def test_padding_of_the_draft_is_never_guessed(tiny, truth):
    draft = noisy_draft(tiny, 0.0)
    rows = draft.lm_head.weight.data  # pyright: ignore
    rows[259:] = 20 * rows[:61]
    found = answer_of(DraftModel(tiny, draft, gamma=3), PROMPT, LENGTH)
    assert found.ids == truth[:LENGTH]
    assert set(found.accepted) == {3}


def test_the_shorter_context_of_the_two_counts(tiny):
    draft = noisy_draft(tiny, 0.0)
    draft.config.max_position_embeddings = 50
    assert DraftModel(tiny, draft, gamma=3).max_positions == 47
