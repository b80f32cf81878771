"""Tiny models of many families, guessers that are right on purpose, and the plain truth to meet.

Legend: T tokens, P positions, K heads, V vocabulary, D hidden size.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor

from medusa_train.decode import Generation, Method, generate
from medusa_train.model.backbone import Backbone
from medusa_train.model.language_model import LanguageModel
from medusa_train.model.tiny import byte_tokenizer, tiny_llama
from medusa_train.ops.tree import Path, Tree, build_tree, chain

VOCAB = 259  # of the byte tokenizer
WINDOW = 8  # shorter than every prompt of these tests
DEPTH = 5  # of the deepest tree
MAX_RANK = 40  # of the guesses; no tree goes that far

_SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)
_SOME_LAYERS_SLIDE = dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
_GEMMA = dict(sliding_window=WINDOW, query_pre_attn_scalar=8)

# name -> (configuration class, model class, settings)
FAMILIES: dict[str, tuple[str, str, dict]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=None)),
    "mistral-sliding": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=WINDOW)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2-sliding": ("Qwen2Config", "Qwen2ForCausalLM", _SOME_LAYERS_SLIDE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-sliding": ("Qwen3Config", "Qwen3ForCausalLM", _SOME_LAYERS_SLIDE),
    # both soft caps are at work only in eager attention
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _GEMMA | dict(attn_implementation="eager", final_logit_softcapping=2.0),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _GEMMA | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", dict(sliding_window=None)),
    "phi3-sliding": ("Phi3Config", "Phi3ForCausalLM", dict(sliding_window=WINDOW)),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(n_embd=32, n_layer=2, n_head=4)),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=4)),
}

# Names of the ways a tree may grow; each goes with heads that are often right
TREES: dict[str, list[Path]] = {
    "chain": chain(4),
    "wide": [(rank,) for rank in range(12)],
    "deep": [*chain(DEPTH), (1,), (0, 1), (1, 0), (1, 0, 0), (1, 0, 0, 0)],
    "single": [(0,)],
}


def grown(nodes: int) -> list[Path]:
    """The likeliest paths where each rank is half as likely as the one before it."""
    paths: list[Path] = [()]
    for path in paths:
        if len(path) < 4:
            paths += [(*path, rank) for rank in range(5)]
    return sorted(paths[1:], key=lambda path: (sum(path) + len(path), path))[:nodes]


TREES["64 nodes"] = grown(64)
TREES["grown"] = grown(14)


def make_tree(choices: Sequence[Path], *, num_heads: int = DEPTH, max_rank: int = VOCAB) -> Tree:
    """Laid out for heads over the bytes."""
    return build_tree(choices, num_heads=num_heads, max_rank=max_rank)


def make_family(name: str, **settings: object) -> Backbone:
    """A random model in fp32 that never ends an answer by itself."""
    config, model, special = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, config)(**{**_SMALL, **special, **settings})
        return Backbone(
            getattr(transformers, model)(made).float(), byte_tokenizer(), name=f"tiny {name}"
        )


def make_llama(**settings: object) -> Backbone:
    """A Llama that never ends an answer by itself, with 61 padding rows in its LM head."""
    model, tokenizer = tiny_llama(**{"hidden_size": 32, "eos_token_id": None, **settings})  # pyright: ignore
    return Backbone(model, tokenizer, name="tiny")


def random_ids(length: int, *, seed: int = 0) -> list[int]:
    """Bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def transformers_greedy(
    backbone: Backbone, prompt: Sequence[int], length: int, *, end_ids: Sequence[int] = ()
) -> list[int]:
    """What `transformers.generate` answers; padding rows of the LM head are held back."""
    padding = list(range(backbone.valid_ids, backbone.vocab_size))
    ids = torch.tensor([list(prompt)], device=backbone.device)
    answer = backbone.model.generate(  # pyright: ignore
        ids,
        attention_mask=torch.ones_like(ids),  # else prompt tokens like the padding are hidden
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        suppress_tokens=padding or None,
    )
    return answer[0, len(prompt) :].tolist()


def answer_of(
    method: Method, prompt: Sequence[int], length: int, *, end_ids: Sequence[int] = ()
) -> Generation:
    """`generate` in one line."""
    return generate(method, prompt, max_new_tokens=length, end_ids=end_ids)


def noisy_draft(backbone: Backbone, noise: float, *, seed: int = 1) -> LanguageModel:
    """A copy of the target with noise in every weight: the less, the more often it is right."""
    model = copy.deepcopy(backbone.model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    head = model.get_output_embeddings()
    return LanguageModel(model.get_decoder(), head, valid_ids=backbone.valid_ids)  # pyright: ignore


def noted(monkeypatch: pytest.MonkeyPatch, owner: object, method: str, note: Callable) -> list:
    """What `note` makes of the arguments of each call from here on."""
    notes, original = [], getattr(owner, method)

    def call(*args, **kwargs):
        notes.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, call)
    return notes


class OracleHeads:
    """In place of `MedusaHeads`: each head holds the true token at a rank chosen beforehand.

    It knows the place in the text by the hidden state, so a wrong state given to the heads shows
    as fewer acceptances than `expected_acceptances` counts.
    """

    token_map = None

    def __init__(
        self, backbone: Backbone, text: Sequence[int], ranks: Tensor, *more: Sequence[int]
    ) -> None:
        """Know whole texts; `ranks` [T, K] says where head k puts token t + k + 2 of each."""
        self._vocab, self._valid = backbone.vocab_size, backbone.valid_ids
        self.dtype, self.device = backbone.dtype, backbone.device
        self.shape = SimpleNamespace(
            num_heads=DEPTH,
            lm_head="own",
            hidden_size=backbone.hidden_size,
            vocab_size=backbone.vocab_size,
            head_vocab_size=backbone.vocab_size,
        )
        states, truths, places = [], [], []
        for known in (text, *more):
            ids = torch.tensor([list(known)], device=backbone.device)
            with torch.no_grad():
                attend = torch.ones_like(ids, dtype=torch.bool)
                states.append(backbone.hidden_states(ids, attend)[0])
            truths.append(torch.tensor([*known, *[0] * (DEPTH + 1)]).unfold(0, DEPTH, 1)[2:])
            places.append(ranks[: len(known)])
        self._states = torch.cat(states)  # [P, D]
        self._truths, self._ranks = torch.cat(truths), torch.cat(places)  # [P, K]

    def __getitem__(self, k: int) -> SimpleNamespace:
        return SimpleNamespace(for_decoding=lambda *, shared: partial(self._logits, k))

    def to_backbone_ids(self, ids: Tensor) -> Tensor:
        """They are the backbone's already."""
        return ids

    def _logits(self, k: int, hidden: Tensor) -> Tensor:
        found = (self._states - hidden.unsqueeze(1)).norm(dim=-1).argmin(dim=-1)
        logits = torch.full((len(hidden), self._vocab), 1e9)  # padding comes first unless cut off
        for row, place in zip(logits, found.tolist(), strict=True):
            truth = int(self._truths[place, k])
            order = [token for token in range(self._valid) if token != truth]
            order.insert(int(self._ranks[place, k]), truth)
            row[order] = -torch.arange(self._valid, dtype=torch.float32)
        return logits.to(hidden.device)


def mixed_ranks(length: int, *, seed: int = 1) -> Tensor:
    """Mostly the best guess, sometimes a later one, sometimes beyond most trees, [T, K]."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.tensor([0.55, 0.2, 0.1] + [0.15 / (MAX_RANK - 3)] * (MAX_RANK - 3))
    drawn = torch.multinomial(likely, length * DEPTH, replacement=True, generator=generator)
    return drawn.view(length, DEPTH)


def expected_acceptances(
    tree: Tree, ranks: Tensor, *, prompt: int, length: int, stopped: bool = False
) -> list[int]:
    """Drafts accepted in each step by the ranks alone, for an answer of `length` tokens.

    What is accepted behind an end id, by which the answer has `stopped`, does not count.
    """
    paths, accepted, emitted = set(tree.paths), [], 1
    while emitted < length:
        place = prompt + emitted - 2  # the state that the newest token was predicted from
        path: Path = ()
        while len(path) < DEPTH and (*path, int(ranks[place, len(path)])) in paths:
            path = (*path, int(ranks[place, len(path)]))
        accepted.append(min(len(path), length - emitted - 1) if stopped else len(path))
        emitted += len(path) + 1
    return accepted
