"""The target's next token at any node: processors as if one token came at a time, and the draw.

What is random belongs to a row's seed and to the place of a token in the answer alone. So an answer
is a function of prompt, method, settings and seed, in a batch as by itself; and every method that
fixes its candidates before the draw gives the very answer of plain decoding.

Legend: B rows, N nodes, M tokens that lead to a node, V vocabulary.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from medusa_train.decode.transfer import sent
from medusa_train.ops.accept import NO_TOKEN
from medusa_train.ops.sample import Sampling, best_ids, draw, penalise, probabilities

# Streams of random numbers, so that no decision reads what another has read
DRAW, ACCEPT, GUESS = range(3)


class Chooser:
    """`Sampling` at work on the rows of one run of a method."""

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        length: int,
        end_ids: Collection[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """Begin answers to prompts.

        Args:
            sampling: for all rows, but for the seed.
            prompts: token ids of each, [B].
            seeds: of each, [B].
            length: the most tokens of an answer, with those of its last block behind its end.
            end_ids: which `min_new_tokens` holds back.
            vocab_size: V, of the target's LM head.
            device: of the logits.
        """
        self.sampling = sampling
        self._device, self._vocab_size = device, vocab_size
        self._emitted = [0] * len(prompts)
        ends = [i for i in sorted(end_ids) if 0 <= i < vocab_size]
        self._end_ids = torch.tensor(ends, dtype=torch.long, device=device)
        banned = [i for i in sampling.banned_ids if i < vocab_size]
        self._banned = torch.tensor(banned, dtype=torch.long, device=device)
        self._numbers = None if sampling.greedy else _numbers(seeds, length).to(device)
        self._seen = None
        if sampling.repetition_penalty != 1:
            # One column more than there are ids, for tokens that are none
            self._seen = torch.zeros(
                (len(prompts), vocab_size + 1), dtype=torch.bool, device=device
            )
            self._see(prompts)

    @property
    def takes_best(self) -> bool:
        """Whether the model's own best token is all that is wanted."""
        return self.sampling.greedy and not self.sampling.processes

    def laws(self, logits: Tensor, trail: Tensor, depth: Tensor) -> Tensor:
        """The law of the next token at each node, float32, [B, N, V].

        Args:
            logits: of any model, in ids of the target, [B, N, V].
            trail: tokens between the newest certain one and the next, `NO_TOKEN` fills, [B, N, M].
            depth: how many those are, [N].
        """
        return probabilities(self._processed(logits, trail, depth), self.sampling)

    def choose(self, logits: Tensor, trail: Tensor, depth: Tensor) -> Tensor:
        """The next token at each node: the best, or drawn from `laws`, [B, N]."""
        if self.sampling.greedy:
            return best_ids(self._processed(logits, trail, depth))
        return draw(self.laws(logits, trail, depth), self.numbers(DRAW, depth))

    def numbers(self, stream: int, depth: Tensor) -> Tensor:
        """Numbers in [0, 1) for the next token at each node, [N] -> [B, N]."""
        assert self._numbers is not None
        return self._numbers[:, stream].gather(1, self._places(depth))

    def note(self, blocks: Sequence[Sequence[int]]) -> None:
        """These tokens are certain now, row by row."""
        self._emitted = [n + len(b) for n, b in zip(self._emitted, blocks, strict=True)]
        if self._seen is not None:
            self._see(blocks)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = sent(list(rows), self._device)
        self._emitted = [self._emitted[row] for row in rows]
        self._numbers = None if self._numbers is None else self._numbers[index]
        self._seen = None if self._seen is None else self._seen[index]

    def _places(self, depth: Tensor) -> Tensor:
        """Of the next token at each node in the answer, [N] -> [B, N]."""
        return sent(self._emitted, self._device).unsqueeze(1) + depth

    def _processed(self, logits: Tensor, trail: Tensor, depth: Tensor) -> Tensor:
        if not self.sampling.processes:
            return logits
        logits = logits.float()
        if self._seen is not None:
            seen = self._seen.unsqueeze(1).repeat(1, logits.shape[1], 1)
            seen.scatter_(2, torch.where(trail == NO_TOKEN, self._vocab_size, trail), True)
            logits = penalise(logits, seen[..., :-1], self.sampling.repetition_penalty)
        else:
            logits = logits.clone()
        if self.sampling.min_new_tokens:
            early = self._places(depth) < self.sampling.min_new_tokens
            ends = logits[..., self._end_ids]
            logits[..., self._end_ids] = ends.masked_fill(early.unsqueeze(-1), float("-inf"))
        logits[..., self._banned] = float("-inf")
        return logits

    def _see(self, blocks: Sequence[Sequence[int]]) -> None:
        assert self._seen is not None
        for row, block in enumerate(blocks):
            self._seen[row, torch.tensor(list(block), dtype=torch.long)] = True


def _numbers(seeds: Sequence[int], length: int) -> Tensor:
    """Streams of each seed, [B, 3, length]; a longer answer only adds to them."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(int(seed))
        rows.append(torch.rand((length, 3), generator=generator, dtype=torch.float64).T)
    return torch.stack(rows)
