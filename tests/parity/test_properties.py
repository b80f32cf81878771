"""Whatever model, prompts, guesses, ends and settings: the answer is that of plain decoding.

Drawn drafts alone have answers of their own; there every row must equal its own run.
"""

from dataclasses import dataclass
from functools import cache

import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from method_case import ToldLookup

from medusa_train.decode import (
    DraftModel,
    Lookup,
    Medusa,
    Plain,
    Sampling,
    StopStrings,
    generate,
    generate_batch,
)
from medusa_train.model.heads import untrained_heads
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.tree import build_tree

CONTEXT, WINDOW, DEPTH = 26, 5, 3
VOCAB = 9  # one more is padding
LETTERS = "abcdefghi"

FAMILIES = {
    "Llama": ("Llama", {}),
    "Mistral": ("Mistral", dict(sliding_window=WINDOW)),
    "GPT2": ("GPT2", {}),
}
HEADS = {"Llama": "LlamaForCausalLM", "Mistral": "MistralForCausalLM", "GPT2": "GPT2LMHeadModel"}


@cache
def make_model(family: str, layers: int, seed: int) -> LanguageModel:
    """Random weights, in which the most likely of nine ids changes with the text."""
    name, special = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB + 1,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, HEADS[family])(config).float().eval()
    model.requires_grad_(False)
    return LanguageModel(model.get_decoder(), model.lm_head, valid_ids=VOCAB)


@cache
def make_heads(model: LanguageModel, seed: int):
    heads = untrained_heads(model.lm_head.weight, num_heads=DEPTH)  # pyright: ignore
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return heads


@st.composite
def trees(draw):
    """A path grows below one that is there already."""
    paths = [()]
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([path for path in paths if len(path) < DEPTH]))
        paths.append((*parent, draw(st.integers(0, 4))))
    return build_tree(set(paths[1:]), num_heads=DEPTH, max_rank=VOCAB)


@dataclass(frozen=True)
class Guesser:
    """How a method is made for a model."""

    kind: str
    seed: int
    gamma: int
    adaptive: bool
    tree: object

    @property
    def draws(self) -> bool:
        return self.kind == "draft"

    def make(self, model, family, layers, texts):
        match self.kind:
            case "told":  # of plain decoding's answers, so that much is accepted
                told = ToldLookup(model, gamma=self.gamma, longest_ngram=4)
                told.told = texts
                return told
            case "medusa":
                return Medusa(model, make_heads(model, self.seed), self.tree)  # pyright: ignore
            case "lookup":
                return Lookup(model, gamma=self.gamma, longest_ngram=1 + self.seed % 3)
        draft = make_model(family, layers, self.seed)  # of one seed in four it is the target
        return DraftModel(model, draft, gamma=self.gamma, adaptive=self.adaptive)


guessers = st.builds(
    Guesser,
    kind=st.sampled_from(["medusa", "told", "lookup", "draft"]),
    seed=st.integers(0, 3),
    gamma=st.integers(1, 4),
    adaptive=st.booleans(),
    tree=trees(),
)
few_ids = st.lists(st.integers(0, VOCAB - 1), max_size=2)
prompts = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 1), min_size=1, max_size=3
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 1e-6, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.6, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    min_new_tokens=st.sampled_from([0, 0, 2, DEPTH + 1, 100]),
    banned_ids=few_ids.map(tuple),
    seed=st.integers(0, 2**40),
)
caps = st.sampled_from([0, 1, 2, DEPTH, DEPTH + 1, 12, 100])
strings = st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=2)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    layers=st.integers(1, 2),
    seed=st.integers(0, 3),
    guesser=guessers,
    prompts=prompts,
    sampling=samplings,
    cap=caps,
    end_ids=few_ids,
    strings=strings,
)
def test_any_answer_is_that_of_plain_decoding(
    family, layers, seed, guesser, prompts, sampling, cap, end_ids, strings
):
    model = make_model(family, layers, seed)
    stop = StopStrings(strings, lambda ids: "".join(LETTERS[i] for i in ids))
    case = dict(max_new_tokens=cap, end_ids=end_ids, sampling=sampling, stop=stop)
    expected = [generate(Plain(model), prompt, **case) for prompt in prompts]
    texts = [prompt + answer.ids for prompt, answer in zip(prompts, expected, strict=True)]
    method = guesser.make(model, family, layers, texts)
    if guesser.draws and not sampling.greedy:
        expected = [generate(method, prompt, **case) for prompt in prompts]
    found = generate_batch(method, prompts, **case)
    for prompt, right, answer in zip(prompts, expected, found, strict=True):
        assert answer.ids == right.ids
        assert answer.finish_reason == right.finish_reason
        room = min(cap, CONTEXT - len(prompt))
        assert len(answer.ids) <= room
        assert (len(answer.ids) == room) or answer.finish_reason == "stop"
        assert all(token < VOCAB for token in answer.ids)
        assert not set(answer.ids) & set(sampling.banned_ids)
        early = answer.ids[: sampling.min_new_tokens]
        assert not set(early) & set(end_ids)
        assert not set(answer.ids[:-1]) & set(end_ids)
