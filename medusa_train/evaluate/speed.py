"""Clocks: step latency by tree size, and whole answers of all methods, interleaved.

Everything that is compared is timed in turn within one run, so that a machine that gets slower or
faster on the way does so for all alike.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from medusa_train.data.prompts import EncodedPrompt
from medusa_train.decode.generation import GREEDY, Method, clock, generate
from medusa_train.evaluate.statistics import Measurement
from medusa_train.model.backbone import Backbone
from medusa_train.ops.sample import Sampling
from medusa_train.track.progress import Meter


@torch.inference_mode()
def step_seconds(methods: Sequence[Method], prompt: Sequence[int], *, repeats: int) -> list[float]:
    """Median seconds of one step of each method, timed in turn after two steps of warm-up.

    Args:
        methods: each on its own cache.
        prompt: token ids that all start from.
        repeats: timed steps of each.
    """
    warmup = 2
    room = (warmup + repeats + 1) * max(method.longest_block for method in methods)
    tokens = [method.start([prompt], room=room) for method in methods]
    times: list[list[float]] = [[] for _ in methods]
    for _ in range(warmup + repeats):
        for i, method in enumerate(methods):
            begin = clock(method.device)
            tokens[i] = [block[-1] for block in method.step(tokens[i])]
            times[i].append(clock(method.device) - begin)
    return [statistics.median(spent[warmup:]) for spent in times]


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
