import torch
from decoding_case import answer_of, make_llama, random_ids, transformers_greedy

from medusa_train.decode import Plain


def test_one_token_a_step(tiny):
    prompt = random_ids(9)
    found = answer_of(Plain(tiny), prompt, 20)
    assert found.ids == transformers_greedy(tiny, prompt, 20)
    assert found.accepted == [0] * 19
    assert found.steps == 19


def test_the_next_token_is_that_of_a_forward_without_a_cache(tiny):
    prompt = random_ids(9)
    text = prompt + answer_of(Plain(tiny), prompt, 12).ids
    with torch.no_grad():
        logits = tiny.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, :, :259]
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == text[len(prompt) :]


def test_the_models_own_end_ids_end_an_answer():
    backbone = make_llama()
    prompt = random_ids(9)
    truth = transformers_greedy(backbone, prompt, 20)
    rows = backbone.lm_head.weight.data  # pyright: ignore
    rows[[truth[7], 256]] = rows[[256, truth[7]]]  # the end id now comes where that token came
    found = answer_of(Plain(backbone), prompt, 20, end_ids=backbone.end_ids)  # pyright: ignore
    assert found.ids == [*truth[: truth.index(truth[7])], 256]
    assert found.finish_reason == "stop"
