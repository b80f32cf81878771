from itertools import combinations

import pytest
import torch
from decoding_case import answer_of, make_family, noted, random_ids, transformers_greedy

from medusa_train.data.hidden_states import online_source
from medusa_train.data.rows import LEAD, Row
from medusa_train.decode import Plain
from medusa_train.decode.batched import answer_batch, shared_length
from medusa_train.ops.sample import Sampling, draw, probabilities

LENGTH = 24
PROMPTS = [random_ids(n, seed=n) for n in (1, 5, 12, 12, 20, 33)]
SAME_BEGIN = [random_ids(11) + prompt for prompt in PROMPTS]  # longer than a window
either = pytest.mark.parametrize("prompts", [PROMPTS, SAME_BEGIN], ids=["apart", "same begin"])


def truths(backbone, prompts=PROMPTS):
    return [transformers_greedy(backbone, prompt, LENGTH) for prompt in prompts]


def cut(answers, ends):
    return [a[: next((i for i, t in enumerate(a) if t in ends), LENGTH) + 1] for a in answers]


def early_ends(backbone, prompts):
    """End ids that stop rows at three steps or more and leave others to the cap; the answers."""
    answers = truths(backbone, prompts)
    for ends in combinations(answers[1][2:], 2):
        lengths = [len(answer) for answer in cut(answers, ends)]
        if max(lengths) == LENGTH and len(set(lengths)) >= 4:
            return set(ends), cut(answers, ends)
    raise AssertionError("no two end ids make these rows end at different steps")


@either
@pytest.mark.parametrize(
    "family", ["llama", "mistral-sliding", "qwen3-sliding", "gemma2", "gemma3", "gpt_neox", "gpt2"]
)
def test_rows_equal_their_own_runs(family, prompts):
    backbone = make_family(family)
    found = answer_batch(backbone, prompts, max_new_tokens=LENGTH, end_ids=())
    assert [answer.ids for answer in found] == truths(backbone, prompts)
    assert {answer.finish_reason for answer in found} == {"length"}
    assert all(answer.hidden is None for answer in found)


@either
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
def test_rows_that_finish_early_leave_and_the_rest_goes_on(monkeypatch, family, prompts):
    backbone = make_family(family)
    ends, expected = early_ends(backbone, prompts)
    sizes = noted(monkeypatch, backbone, "forward", lambda ids, **_: len(ids))
    found = answer_batch(backbone, prompts, max_new_tokens=LENGTH, end_ids=ends)
    together = sizes[1:]  # the first may be what all begin with
    assert [answer.ids for answer in found] == expected
    reasons = ["length" if len(ids) == LENGTH else "stop" for ids in expected]
    assert [answer.finish_reason for answer in found] == reasons
    alone = [answer_of(Plain(backbone), p, LENGTH, end_ids=list(ends)) for p in prompts]
    assert [(a.ids, a.finish_reason) for a in alone] == [(a.ids, a.finish_reason) for a in found]
    assert together[0] == len(prompts) > together[-1]
    assert together == sorted(together, reverse=True)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
@pytest.mark.parametrize("early", [False, True])
@either
def test_hidden_states_equal_those_of_a_forward_without_a_cache(family, prompts, early):
    backbone = make_family(family)
    ends = early_ends(backbone, prompts)[0] if early else set()
    found = answer_batch(backbone, prompts, max_new_tokens=LENGTH, end_ids=ends, lead=LEAD - 1)
    source = online_source(backbone.hidden_states, backbone.device)
    for prompt, answer in zip(prompts, found, strict=True):
        row = Row(
            id="",
            kind="",
            prompt="",
            answer="",
            ids=prompt + answer.ids,
            mask=[False] * len(prompt) + [True] * len(answer.ids),
            finish_reason=answer.finish_reason,
        )
        torch.testing.assert_close(answer.hidden, source([row])[0], rtol=1e-4, atol=1e-4)


def test_what_all_begin_with_is_read_once(monkeypatch, tiny):
    asked = noted(monkeypatch, tiny, "forward", lambda ids, **_: tuple(ids.shape))
    answer_batch(tiny, SAME_BEGIN, max_new_tokens=2, end_ids=())
    assert asked == [(1, 11), (6, 33), (6, 1)]


@pytest.mark.parametrize(
    ("prompts", "apart", "length"),
    [
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3]], 1, 2),
        ([[1, 2, 3], [1, 2, 3]], 1, 2),  # each keeps its last token
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 3, 2),
        ([[1, 2], [1, 2, 3, 4]], 1, 1),
        ([[1, 2], [1, 2, 3, 4]], 8, 0),
        ([[2, 9, 9], [1, 9, 9]], 1, 0),
        ([[5, 6, 1, 9], [5, 7, 1, 9], [5, 6, 2, 9]], 1, 1),
        ([[1, 2, 3]], 1, 0),  # there is nobody to share with
    ],
)
def test_how_much_is_shared(prompts, apart, length):
    assert shared_length(prompts, apart=apart) == length


def test_one_token_and_one_row(tiny):
    found = answer_batch(tiny, PROMPTS[2:3], max_new_tokens=1, end_ids=(), lead=2)
    assert found[0].ids == transformers_greedy(tiny, PROMPTS[2], 1)
    assert found[0].hidden is not None
    assert found[0].hidden.shape == (3, tiny.hidden_size)


def test_all_rows_may_end_at_once(tiny):
    first = transformers_greedy(tiny, PROMPTS[1], 1)
    found = answer_batch(tiny, [PROMPTS[1]] * 3, max_new_tokens=LENGTH, end_ids=first)
    assert [(a.ids, a.finish_reason) for a in found] == [(first, "stop")] * 3


def test_drawn_answers_belong_to_their_rows_and_not_to_the_batch(tiny):
    """Each row draws with its own numbers, also after others have left the batch."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(len(PROMPTS), LENGTH, dtype=torch.float64, generator=generator)

    def answers(of, end_ids):
        def choose(logits, rows, step):
            law = probabilities(logits, Sampling(temperature=0.8, top_p=0.9))
            return draw(law, numbers[of][rows, step])

        prompts = [PROMPTS[i] for i in of]
        found = answer_batch(tiny, prompts, max_new_tokens=LENGTH, end_ids=end_ids, choose=choose)
        return [answer.ids for answer in found]

    everyone = list(range(len(PROMPTS)))
    free = answers(everyone, ())
    ends = [free[0][2], free[4][5]]
    together = answers(everyone, ends)
    assert together == [answers([i], ends)[0] for i in everyone]
    assert together == answers(everyone[::-1], ends)[::-1]
    assert len(together[0]) <= 3
    assert max(map(len, together)) == LENGTH
    assert free != truths(tiny)


def test_padding_rows_of_the_lm_head_are_never_drawn(tiny):
    largest = []

    def choose(logits, rows, step):
        largest.append(logits[:, 259:].max())
        return logits.argmax(-1)

    answer_batch(tiny, PROMPTS, max_new_tokens=3, end_ids=(), choose=choose)
    assert torch.stack(largest).isneginf().all()
