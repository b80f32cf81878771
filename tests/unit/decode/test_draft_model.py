import copy

import pytest
import torch
from decoding_case import (
    answer_of,
    make_family,
    noisy_draft,
    noted,
    random_ids,
    transformers_greedy,
)

from medusa_train.decode import DraftModel, Plain, Sampling, generate
from medusa_train.decode.draft_model import next_limit
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


def resized(tiny, rows):
    """The target itself with so many rows in embeddings and LM head, those beyond it large."""
    model = copy.deepcopy(tiny.model)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.lm_head.weight.data[259:] = 20 * model.lm_head.weight.data[: max(0, rows - 259)]
    return LanguageModel(model.model, model.lm_head, valid_ids=min(rows, 259))


@pytest.mark.parametrize("rows", [259, 300, 330])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_more_or_less_padding_than_the_target(tiny, rows, temperature):
    """Of one tokenizer with 259 ids; the target has 320 rows."""
    method = DraftModel(tiny, resized(tiny, rows), gamma=3)
    sampling = Sampling(temperature=temperature, seed=1)
    found = generate(method, PROMPT, max_new_tokens=LENGTH, end_ids=(), sampling=sampling)
    assert max(found.ids) < 259
    assert set(found.accepted) == {3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_whose_padding_nobody_told_of(tiny, temperature):
    """It likes ids best that the target has no row for; they are no guesses."""
    draft = resized(tiny, 500)
    draft = LanguageModel(draft.decoder, draft.lm_head)
    sampling = Sampling(temperature=temperature, seed=1)
    found = generate(
        DraftModel(tiny, draft, gamma=3),
        PROMPT,
        max_new_tokens=LENGTH,
        end_ids=(),
        sampling=sampling,
    )
    assert max(found.ids) < 259
    assert min(found.accepted) == 0
    if temperature == 0:
        assert found.ids == transformers_greedy(tiny, PROMPT, LENGTH)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_lacks_ids_of_the_target(tiny, temperature):
    """Such as tokens that were added to the target later: they are never guessed."""
    draft = resized(tiny, 200)
    sampling = Sampling(temperature=temperature, seed=1)
    settings = dict(max_new_tokens=LENGTH, end_ids=(), sampling=sampling)
    prompt = [*PROMPT, 230, 258, 257]
    found = generate(DraftModel(tiny, draft, gamma=3), prompt, **settings)
    assert max(found.ids) >= 200
    assert sum(found.accepted) > 0
    if temperature == 0:
        assert found.ids == generate(Plain(tiny), prompt, **settings).ids


def test_guesses_per_step_are_as_many_as_asked_for(monkeypatch, tiny):
    """The target reads its newest token and exactly so many guesses, up to the last step."""
    sizes = noted(monkeypatch, tiny, "forward", lambda ids, **_: ids.shape[1])
    found = answer_of(DraftModel(tiny, noisy_draft(tiny, 0.01), gamma=5), PROMPT, LENGTH)
    assert sizes == [len(PROMPT)] + [6] * found.steps


def test_no_guesses_at_all_are_refused(tiny):
    with pytest.raises(ValueError, match="gamma must be a whole number, at least 1, got 0"):
        DraftModel(tiny, noisy_draft(tiny, 0.0), gamma=0)


@pytest.mark.parametrize(
    ("limit", "accepted", "following"),
    [(4, 4, 6), (4, 3, 3), (4, 0, 3), (1, 1, 3), (1, 0, 1), (2, 0, 1), (15, 15, 16), (16, 16, 16)],
)
def test_the_next_number_of_guesses(limit, accepted, following):
    assert next_limit(limit, accepted) == following


def test_a_large_first_number_of_guesses_stays_the_most(monkeypatch, tiny):
    method = DraftModel(tiny, tiny, gamma=20, adaptive=True)
    sizes = noted(monkeypatch, tiny, "forward", lambda ids, **_: ids.shape[1])
    answer_of(method, PROMPT, 64)
    assert [size for size in sizes if size > 2] == [len(PROMPT), len(PROMPT) - 1, 21, 21, 21]


def adaptive_sizes(monkeypatch, tiny, draft, prompts):
    """Guesses of each step of one method on one prompt after the other."""
    method = DraftModel(tiny, draft, gamma=4, adaptive=True)
    sizes = noted(monkeypatch, tiny, "forward", lambda ids, **_: ids.shape[1] - 1)
    found = []
    for prompt in prompts:
        answer = answer_of(method, prompt, LENGTH)
        assert answer.ids == transformers_greedy(tiny, prompt, LENGTH)
        found.append((sizes[1:], answer.accepted))
        sizes.clear()
    return found


def test_an_adaptive_draft_follows_its_rule_and_starts_anew_with_each_prompt(monkeypatch, tiny):
    """So that a result does not depend on the order of the prompts."""
    draft = noisy_draft(tiny, 0.01)
    first, second = PROMPT, random_ids(17, seed=5)
    there = adaptive_sizes(monkeypatch, tiny, draft, [first, second])
    monkeypatch.undo()
    back = adaptive_sizes(monkeypatch, tiny, draft, [second, first])
    assert there == back[::-1]
    for sizes, accepted in there:
        assert sizes[0] == 4
        for size, more, following in zip(sizes, accepted, sizes[1:], strict=False):
            assert following == next_limit(size, more)
        assert len(set(sizes)) > 2


def test_a_draft_with_a_shorter_context_than_the_target():
    """It guesses badly beyond its own last position, where the target goes on as ever."""
    target = make_family("gpt2", max_position_embeddings=64)
    draft = make_family("gpt2", max_position_embeddings=20)
    for length in (10, 30):
        prompt = random_ids(length)
        method = DraftModel(target, draft, gamma=3)
        assert method.max_positions == 64
        found = answer_of(method, prompt, 100)
        assert found.ids == transformers_greedy(target, prompt, 64 - length)
