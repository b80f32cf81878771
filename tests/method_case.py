"""Every decoding method with guesses that are often right, for tests of what holds for all."""

from collections.abc import Collection, Sequence

from decoding_case import (
    TREES,
    OracleHeads,
    answer_of,
    make_tree,
    mixed_ranks,
    noisy_draft,
    transformers_greedy,
)

from medusa_train.decode import DraftModel, Generation, Lookup, Medusa, Method, Plain
from medusa_train.model.backbone import Backbone

LENGTH = 24  # tokens of an answer
METHODS = ["plain", "draft", "adaptive", "medusa", "lookup"]
GUESSING = METHODS[1:]


class ToldLookup(Lookup):
    """A lookup that has read some texts before it starts."""

    told: Sequence[Sequence[int]] = ()

    def _begin(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], *, room: int) -> None:
        super()._begin(prompts, tokens, room=room)
        for text, prompt, token in zip(self._texts, prompts, tokens, strict=True):
            for known in self.told:
                text.extend(known)
            text.extend([*prompt, token])


class Case:
    """A prompt, its true answer, and methods that are mostly right about it."""

    def __init__(self, backbone: Backbone, prompt: list[int], *, ahead: int = 12) -> None:
        """Know so many tokens more of the answer than `LENGTH`."""
        self.backbone, self.prompt = backbone, prompt
        self.truth = transformers_greedy(backbone, prompt, LENGTH + ahead)

    def method(self, name: str) -> Method:
        """By its name in `METHODS`."""
        return make_method(name, self.backbone, self.prompt + self.truth, right=True)

    def answer(self, name: str, length: int = LENGTH, end_ids: Collection[int] = ()) -> Generation:
        """What a method says."""
        return answer_of(self.method(name), self.prompt, length, end_ids=end_ids)

    def expected(self, length: int = LENGTH, end_ids: Collection[int] = ()) -> list[int]:
        """What transformers says."""
        return transformers_greedy(self.backbone, self.prompt, length, end_ids=end_ids)


def make_method(
    name: str, backbone: Backbone, *texts: Sequence[int], noise: float = 0.005, right: bool = False
) -> Method:
    """A method by its name in `METHODS`.

    Args:
        name: which.
        backbone: the target.
        texts: prompts with their answers, which heads and lookup guess from.
        noise: in the weights of the draft; 0 is always right.
        right: whether heads and lookup are always right.
    """
    match name:
        case "plain":
            return Plain(backbone)
        case "draft":
            return DraftModel(backbone, noisy_draft(backbone, noise), gamma=4)
        case "adaptive":
            return DraftModel(backbone, noisy_draft(backbone, noise), gamma=4, adaptive=True)
        case "lookup":
            method = ToldLookup(backbone, gamma=4)
            method.told = texts if right else [_misread(text) for text in texts]
            return method
    ranks = mixed_ranks(max(map(len, texts)))
    heads = OracleHeads(backbone, texts[0], ranks * (not right), *texts[1:])
    tree = make_tree(TREES["chain" if right else "deep"])
    return Medusa(backbone, heads, tree)  # pyright: ignore


def _misread(text: Sequence[int]) -> list[int]:
    """Every seventh token is another one; where, depends on the first."""
    return [token if (i + text[0]) % 7 else (token + 1) % 256 for i, token in enumerate(text)]
