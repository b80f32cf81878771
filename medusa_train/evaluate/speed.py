"""Clocks: step latency by tree size, and whole answers of all methods, interleaved.

Everything that is compared is timed in turn within one run, so that a machine that gets slower or
faster on the way does so for all alike.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from medusa_train.data.prompts import EncodedPrompt
from medusa_train.decode.generation import GREEDY, Method, clock, generate
from medusa_train.evaluate.statistics import Measurement
from medusa_train.model.backbone import Backbone
from medusa_train.ops.sample import Sampling
from medusa_train.track.progress import Meter


def step_seconds(methods: Sequence[Method], prompt: Sequence[int], *, repeats: int) -> list[float]:
    """Median seconds of one step of each method, timed in turn after two steps of warm-up.

    Args:
        methods: each on its own cache.
        prompt: token ids that all start from.
        repeats: timed steps of each.
    """
    warmup = 2
    room = (warmup + repeats + 1) * max(method.longest_block for method in methods)
    clocks = [step_clock(method, prompt, room=room) for method in methods]
    times = [[timed(1) for timed in clocks] for _ in range(warmup + repeats)]
    return [statistics.median(spent) for spent in zip(*times[warmup:], strict=True)]


def step_clock(method: Method, prompt: Sequence[int], *, room: int) -> Callable[[int], float]:
    """Read a prompt; then go on by so many steps at every call: mean seconds of one of them.

    Args:
        method: not used for anything else meanwhile.
        prompt: token ids; reading them is not timed.
        room: tokens that all steps together may emit.
    """
    tokens = method.start([prompt], room=room)

    def seconds(steps: int) -> float:
        nonlocal tokens
        begin = clock(method.device)
        for _ in range(steps):
            tokens = [block[-1] for block in method.step(tokens)]
        return (clock(method.device) - begin) / steps

    return seconds


def measure(
    methods: Mapping[str, Method],
    prompts: Sequence[EncodedPrompt],
    backbone: Backbone,
    *,
    max_new_tokens: int,
    warmup: int,
    meter: Meter,
    samplings: Mapping[str, Sampling] | None = None,
) -> dict[str, list[Measurement]]:
    """Answer every prompt with every method, prompt by prompt.

    The order of the methods turns by one with each prompt, so that none always comes first.

    Args:
        methods: by name.
        prompts: answered by all.
        backbone: whose end ids stop the answers.
        max_new_tokens: the cap, the same for all.
        warmup: so many prompts are answered once before, untimed.
        meter: advanced by one for each prompt.
        samplings: of methods that are not greedy, by name; each prompt has a seed of its own,
            counted on from the given one.
    """

    def answer(name: str, place: int, encoded: EncodedPrompt) -> Measurement:
        sampling = (samplings or {}).get(name, GREEDY)
        generation = generate(
            methods[name],
            encoded.ids,
            max_new_tokens=max_new_tokens,
            end_ids=backbone.end_ids,
            sampling=replace(sampling, seed=sampling.seed + place),
        )
        prompt = encoded.prompt
        return Measurement(prompt_id=prompt.id, kind=prompt.kind, generation=generation)

    names = list(methods)
    for i, encoded in enumerate(prompts[:warmup]):
        for name in names:
            answer(name, i, encoded)
    measured: dict[str, list[Measurement]] = {name: [] for name in names}
    for i, encoded in enumerate(prompts):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            measured[name].append(answer(name, i, encoded))
        meter.advance()
    return measured
