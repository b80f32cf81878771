"""One loop for every decoding method: prefill, steps, stopping, clocks; whole or as a stream.

backbone = load_backbone(...)
method = Medusa(backbone, heads, tree)
prompt = backbone.encode_prompt("Why is the sky blue?", system=None)
for part in stream(method, prompt, max_new_tokens=256, end_ids=backbone.end_ids):
    show(part.tokens)  # part.accepted of them were guessed by the heads
"""

import operator
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch

from medusa_train.decode.chooser import Chooser
from medusa_train.decode.method import Method
from medusa_train.decode.stopping import FinishReason, StopStrings, cut_block
from medusa_train.errors import DataError
from medusa_train.ops.sample import SEED_RULE, Sampling, is_seed

GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one step adds to an answer."""

    tokens: list[int]
    # What the step emitted less one: all up to an end of the answer, and also what the cap has cut
    # off; None of the prefill
    accepted: int | None
    finish_reason: FinishReason | None  # of the answer, if it ends here
    seconds: float  # since the run began


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


def generate(
    method: Method,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    sampling: Sampling = GREEDY,
    stop: StopStrings | None = None,
) -> Generation:
    """Answer one prompt.

    Args:
        method: how to decode.
        prompt: token ids, at least one.
        max_new_tokens: at most so many; the context may allow fewer.
        end_ids: ids that end the answer and are kept as its last token.
        sampling: how tokens follow from logits.
        stop: strings that end the answer.

    Raises:
        DataError: if the prompt is empty, has an id that the model cannot read or leaves no room
            in the context; or if no id may be said.
    """
    (found,) = generate_batch(
        method,
        [prompt],
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
        sampling=sampling,
        stop=stop,
    )
    return found


def generate_batch(
    method: Method,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
    stop: StopStrings | None = None,
) -> list[Generation]:
    """Answer prompts together, each as by itself. Rows that have ended leave the batch.

    Args:
        method: how to decode.
        prompts: token ids, at least one each.
        max_new_tokens: as `generate`.
        end_ids: as `generate`.
        sampling: as `generate`.
        seeds: of each row; None for that of `sampling` in all, with which a prompt that stands
            twice gets the same answer twice.
        stop: as `generate`.

    Raises:
        DataError: as `generate`, and if there are not as many seeds as prompts.
    """
    parts: list[list[Part]] = [[] for _ in prompts]
    run = _run(method, prompts, max_new_tokens, end_ids, sampling, seeds, stop)
    for row, part in run:
        parts[row].append(part)
    return [_joined(found) for found in parts]


def stream(
    method: Method,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    sampling: Sampling = GREEDY,
    stop: StopStrings | None = None,
) -> Iterator[Part]:
    """As `generate`, step by step. It may be abandoned at any time.

    Raises:
        DataError: as `generate`, at once; and between two parts, if the method has begun another
            answer meanwhile.
    """
    run = _run(method, [prompt], max_new_tokens, end_ids, sampling, None, stop)
    return (part for _, part in run)


def answer_room(prompt_length: int, max_new_tokens: int, max_positions: int) -> int:
    """How many tokens the answer may have.

    Raises:
        DataError: if the prompt is empty or fills the context.
    """
    if prompt_length == 0:
        raise DataError("the prompt has no tokens; give at least one")
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
        raise DataError(f"max_new_tokens must be a whole number, 0 or more, got {max_new_tokens}")
    if max_positions - prompt_length < 1:
        raise DataError(
            f"a prompt of {prompt_length} tokens leaves no room for an answer in a context of "
            f"{max_positions}; shorten or drop it"
        )
    return min(int(max_new_tokens), max_positions - prompt_length)


def clock(device: torch.device) -> float:
    """Seconds on a running clock, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _run(
    method: Method,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_ids: Collection[int],
    sampling: Sampling,
    seeds: Sequence[int] | None,
    stop: StopStrings | None,
) -> Iterator[tuple[int, Part]]:
    """Refuse what cannot be, then give each row's parts, step by step."""
    ends = _check(method, prompts, end_ids, sampling, seeds)
    read = [method.model.decoder_prompt(prompt) for prompt in prompts]
    rooms = [answer_room(len(p), max_new_tokens, method.max_positions) for p in read]
    if max_new_tokens == 0 or not prompts:
        return iter(())
    chooser = Chooser(
        sampling,
        read,
        seeds=[sampling.seed] * len(prompts) if seeds is None else seeds,
        length=max(rooms) + method.longest_block,
        end_ids=ends,
        vocab_size=method.model.vocab_size,
        device=method.device,
    )
    return _parts(method, prompts, rooms, ends, chooser, stop)


@torch.inference_mode()
def _parts(
    method: Method,
    prompts: Sequence[Sequence[int]],
    rooms: Sequence[int],
    end_ids: Collection[int],
    chooser: Chooser,
    stop: StopStrings | None,
) -> Iterator[tuple[int, Part]]:
    begin = clock(method.device)
    rows, answers = list(range(len(prompts))), [[] for _ in prompts]
    with method.lock:
        blocks = [[t] for t in method.start(prompts, room=max(rooms), chooser=chooser)]
        run = method.run
    prefilled = False
    while True:
        now, going = clock(method.device) - begin, []
        for place, (row, block) in enumerate(zip(rows, blocks, strict=True)):
            answer, room = answers[row], rooms[row]
            kept, reason = cut_block(
                block, room=room - len(answer), end_ids=end_ids, before=answer, stop=stop
            )
            answer += kept
            # Nothing behind an end was ever part of an answer; the cap is merely ours
            accepted = len(kept if reason == "stop" else block) - 1 if prefilled else None
            yield row, Part(tokens=kept, accepted=accepted, finish_reason=reason, seconds=now)
            if reason is None:
                going.append(place)
        if not going:
            return
        with method.lock:
            if method.run != run:
                raise DataError(
                    f"{method.name} has begun another answer before this one was done: make a "
                    "method for each stream"
                )
            if len(going) < len(rows):
                method.keep(going)
            rows, prefilled = [rows[place] for place in going], True
            blocks = method.step([answers[row][-1] for row in rows])


def _check(
    method: Method,
    prompts: Sequence[Sequence[int]],
    end_ids: Collection[int],
    sampling: Sampling,
    seeds: Sequence[int] | None,
) -> frozenset[int]:
    """Refuse what would fail on the way; gives the end ids."""
    if seeds is not None and len(seeds) != len(prompts):
        raise DataError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one for each")
    for seed in () if seeds is None else seeds:
        if not is_seed(seed):
            raise DataError(f"a seed must be {SEED_RULE}, got {seed}")
    ends = frozenset(_whole_numbers(end_ids, "end_ids"))
    model = method.model
    for row, prompt in enumerate(prompts):
        ids = _whole_numbers(prompt, f"prompt {row}")
        wrong = next((i for i in ids if not 0 <= i < model.readable_ids), None)
        if wrong is not None:
            raise DataError(
                f"prompt {row} has the id {wrong}; the model reads 0 to {model.readable_ids - 1}"
            )
    unsaid = set(sampling.banned_ids)
    if sampling.min_new_tokens:
        unsaid.update(ends)
    if sum(0 <= i < model.valid_ids for i in unsaid) == model.valid_ids:
        raise DataError(
            "banned_ids, with the end ids that min_new_tokens holds back, are all ids that the "
            "model can say; leave some out"
        )
    return ends


def _whole_numbers(ids: Iterable[int], name: str) -> list[int]:
    try:
        return [operator.index(i) for i in ids]
    except TypeError:
        shown = repr(ids).partition("\n")[0][:80]
        raise DataError(f"{name} must be a list of token ids, got {shown}") from None


def _joined(parts: Sequence[Part]) -> Generation:
    if not parts:
        return Generation(
            ids=[], finish_reason="length", accepted=[], prefill_seconds=0.0, decode_seconds=0.0
        )
    reason = parts[-1].finish_reason
    assert reason is not None
    return Generation(
        ids=[token for part in parts for token in part.tokens],
        finish_reason=reason,
        accepted=[part.accepted for part in parts if part.accepted is not None],
        prefill_seconds=parts[0].seconds,
        decode_seconds=parts[-1].seconds - parts[0].seconds,
    )
