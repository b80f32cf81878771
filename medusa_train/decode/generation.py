"""One loop for every decoding method: prefill, steps, stopping, clocks."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from medusa_train.decode.stopping import FinishReason, cut_block
from medusa_train.errors import DataError


class Method(Protocol):
    """A decoding method working on one prompt at a time; `start` forgets everything before."""

    name: str

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def longest_block(self) -> int:
        """The most tokens that a step can emit."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest context it can serve, prompt and answer together."""
        ...

    def start(self, prompt: Sequence[int], *, room: int) -> int:
        """Read the prompt, with memory for `room` tokens of answer; gives the first of them."""
        ...

    def step(self, token: int) -> list[int]:
        """Feed the newest token; gives the tokens that one forward of the target emits."""
        ...


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An answer and how it came about."""

    ids: list[int]
    finish_reason: FinishReason
    accepted: list[int]  # drafts accepted in each step, up to an end id but not cut by the cap
    prefill_seconds: float  # until the first token is there
    decode_seconds: float  # all steps

    @property
    def steps(self) -> int:
        """Forwards of the target after the prefill."""
        return len(self.accepted)

    @property
    def seconds(self) -> float:
        """Prefill and steps."""
        return self.prefill_seconds + self.decode_seconds


@torch.inference_mode()
def generate(
    method: Method, prompt: Sequence[int], *, max_new_tokens: int, end_ids: Collection[int]
) -> Generation:
    """Answer one prompt.

    Args:
        method: how to decode.
        prompt: token ids, at least one.
        max_new_tokens: at most so many, at least 1; the context may allow fewer.
        end_ids: ids that end the answer and are kept as its last token.

    Raises:
        DataError: if the prompt is empty or leaves no room in the context.
    """
    room = answer_room(len(prompt), max_new_tokens, method.max_positions)
    begin = clock(method.device)
    ids, reason = cut_block([method.start(prompt, room=room)], room=room, end_ids=end_ids)
    first = clock(method.device)
    accepted: list[int] = []
    while reason is None:
        block = method.step(ids[-1])
        kept, reason = cut_block(block, room=room - len(ids), end_ids=end_ids)
        # Nothing behind an end id was ever part of an answer; the cap is merely ours
        accepted.append(len(kept if reason == "stop" else block) - 1)
        ids += kept
    return Generation(
        ids=ids,
        finish_reason=reason,
        accepted=accepted,
        prefill_seconds=first - begin,
        decode_seconds=clock(method.device) - first,
    )


def answer_room(prompt_length: int, max_new_tokens: int, max_positions: int) -> int:
    """How many tokens the answer may have.

    Raises:
        DataError: if the prompt is empty or fills the context.
    """
    if prompt_length == 0:
        raise DataError("the prompt has no tokens; give at least one")
    room = min(max_new_tokens, max_positions - prompt_length)
    if room < 1:
        raise DataError(
            f"a prompt of {prompt_length} tokens leaves no room for an answer in a context of "
            f"{max_positions}; shorten or drop it"
        )
    return room


def clock(device: torch.device) -> float:
    """Seconds on a running clock, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
