"""The checks of `gpu_check.sh`, one function each. Nothing is downloaded: all models are random."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4  # of every logged loss, in float32 without TF32, against the same run on a CPU
LONGEST = 200.0  # seconds for one process
TRAINED = ("medusa1", "medusa2", "draft")
TREE_NODES = (1, 2, 4, 8, 16, 32, 64)
# Both smoke recipes in one. Dropout is off, since a GPU draws other random numbers than a CPU, and
# hidden states are computed anew, so that those of the device are compared
TRAINING = (
    "+recipe=smoke_medusa2",
    "medusa1.hidden_states=online",
    "medusa2.hidden_states=online",
    "medusa2.lora.dropout=0.0",
)
# Of the model that decoding and training are timed on: 1.1 billion parameters, or next to nothing
SIZES = {
    "cuda": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
    },
    "cpu": {"hidden_size": 64, "num_layers": 4},
}


class CheckError(Exception):
    """Why a check failed, in words."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where checks run."""

    device: str  # cuda, or cpu for a dry run
    work: Path  # a temporary folder: recipes write to `outputs` in it
    deadline: float  # by `time.monotonic`

    @property
    def model(self) -> Path:
        """Folder of the large random model."""
        return self.work / "model"

    @property
    def runs(self) -> Path:
        """Where recipes write."""
        return self.work / "outputs"

    def python(self, *arguments: str | Path) -> None:
        """Run the interpreter in a process of its own; it is killed when it takes too long.

        Raises:
            CheckError: with the end of what it said, if it failed.
        """
        launch = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
        env = {name: value for name, value in os.environ.items() if name not in launch}
        paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        limit = max(1.0, min(LONGEST, self.deadline - time.monotonic()))
        try:
            done = subprocess.run(
                [sys.executable, *map(str, arguments)],
                cwd=self.work,
                env=env | {"GPU_TESTS_ON": self.device},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            raise CheckError(f"stopped after {limit:.0f} s") from None
        if done.returncode != 0:
            raise CheckError(f"exit status {done.returncode}: ...{done.stdout[-2000:].strip()}")


# Fills in what it measures; gives the reason why it was left out, if it was
Check = Callable[[Place, dict[str, Any]], str | None]


def reference(place: Place, numbers: dict[str, Any]) -> None:
    """What the engines are compared with: the same training on the CPU, in plain torch."""
    stages = f"stages=[distill,{','.join(TRAINED)}]"
    run = ("run_name=reference", "model.device=cpu", "deepspeed=none", stages)
    place.python("-m", "medusa_train", *TRAINING, *run)


def tests(place: Place, numbers: dict[str, Any], *, select: str) -> None:
    """Tests in tests/gpu; those of exactness are among them."""
    report = place.work / "tests.xml"
    report.unlink(missing_ok=True)
    options = ("-q", "-p", "no:cacheprovider", "--color=no", f"--junitxml={report}", "-k", select)
    try:
        place.python("-m", "pytest", ROOT / "tests" / "gpu", *options)
    finally:
        suite = ElementTree.parse(report).getroot().find("testsuite") if report.is_file() else None
        if suite is not None:
            for name in ("tests", "failures", "errors", "skipped"):
                numbers[name] = int(suite.get(name, "0"))
    if numbers["tests"] == numbers["skipped"]:
        raise CheckError("every test was skipped")


def compiled(place: Place, numbers: dict[str, Any]) -> str | None:
    """Those tests that compile, which takes longest."""
    if place.device == "cpu":
        return "a dry run compiles nothing"
    return tests(place, numbers, select="compile")


def smoke(place: Place, numbers: dict[str, Any]) -> None:
    """The recipe `smoke` as a user runs it, all stages on the device."""
    place.python("-m", "medusa_train", "+recipe=smoke", f"model.device={place.device}")
    results = json.loads((place.runs / "smoke" / "evaluate" / "results.json").read_text())
    for name in ("medusa", "draft_model"):
        found = results["methods"][name]["exactness"]
        numbers[f"{name}_identical_answers"] = found["identical"]
        if found["identical"] != found["prompts"]:
            raise CheckError(f"{name}: answers of {found['differing_prompts']} differ from plain")


def engine(place: Place, numbers: dict[str, Any], *, choice: str) -> str | None:
    """Train on the rows of `reference`; each loss that is logged is that of the CPU."""
    if choice != "none" and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    stages = (*TRAINED, "evaluate") if choice == "none" else TRAINED
    rows = place.runs / "reference" / "distill"
    run = (f"run_name={choice}", f"model.device={place.device}", f"deepspeed={choice}")
    more = (f"stages=[{','.join(stages)}]", f"paths.distill={rows}")
    place.python("-m", "medusa_train", *TRAINING, *run, *more)
    for stage in TRAINED:
        here, there = (place.runs / name / stage for name in (choice, "reference"))
        numbers[f"{stage}_largest_difference"] = largest_difference(here, there)
    if not max(numbers.values()) <= TOLERANCE:
        raise CheckError(f"losses differ from those of the CPU by more than {TOLERANCE}")
    return None


def largest_difference(here: Path, there: Path) -> float:
    """Of all training losses that two runs of a stage have logged."""
    found, expected = logged_losses(here), logged_losses(there)
    if not expected or found.keys() != expected.keys():
        raise CheckError(f"{here.name}: losses at {sorted(found)}, expected {sorted(expected)}")
    return max(abs(found[key] - expected[key]) for key in expected)


def logged_losses(stage: Path) -> dict[tuple[int, str], float]:
    """Training losses of a stage by step and name."""
    lines = map(json.loads, (stage / "metrics.jsonl").read_text().splitlines())
    return {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if name.startswith("train/") and name.endswith("loss")
    }


def model(place: Place, numbers: dict[str, Any]) -> None:
    """Save the large random model, in bfloat16."""
    import torch

    from medusa_train.model.backbone import quiet_transformers
    from medusa_train.model.tiny import tiny_llama

    with torch.device(place.device):
        llama, tokenizer = tiny_llama(**SIZES[place.device])
    numbers["parameters"] = llama.num_parameters()
    with quiet_transformers():
        llama.to(torch.bfloat16).save_pretrained(place.model)
        tokenizer.save_pretrained(place.model)


def trees(place: Place, numbers: dict[str, Any]) -> None:
    """What a step costs by the nodes of the tree, over what a step of plain decoding costs."""
    from bench.case import build_case
    from bench.decode import NUM_HEADS, decoding_heads, tree_method
    from medusa_train.evaluate.speed import step_seconds

    dry = place.device == "cpu"
    case = build_case(model=str(place.model), repeats=5, tiny=dry)
    heads = decoding_heads(case.backbone)
    methods = [tree_method(case.backbone, heads, nodes) for nodes in (0, *TREE_NODES)]
    repeats = 3 if dry else 60
    prompt = case.prompts(1, max_new_tokens=(repeats + 4) * (NUM_HEADS + 1))[0]
    plain, *steps = step_seconds(methods, prompt, repeats=repeats)
    numbers |= {"prompt_tokens": len(prompt), "plain_ms": 1e3 * plain}
    for nodes, seconds in zip(TREE_NODES, steps, strict=True):
        numbers[f"overhead_{nodes}_nodes"] = seconds / plain


def large(place: Place, numbers: dict[str, Any]) -> str | None:
    """What a step with a tree costs on a model of the shape of Llama 7B: the one bound on speed."""
    import torch

    from bench.large import BOUND, NEEDED, measure, too_slow

    on_gpu = place.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # of the checks before
        if torch.cuda.get_device_properties(0).total_memory < NEEDED:
            return f"a model of 7B parameters wants a card with {NEEDED // 2**30} GiB"
    measure(place.device, numbers)
    if on_gpu and (slow := too_slow(numbers)):
        raise CheckError(f"above {BOUND}: {', '.join(slow)}")
    return None


def benchmark(place: Place, numbers: dict[str, Any], *, name: str) -> None:
    """The rows of `scripts/benchmark.py`; `train` has the memory of the loss for K=5 and K=1."""
    import torch

    torch.cuda.empty_cache()  # of the checks before, where there is CUDA
    rows = place.work / f"{name}.json"
    tiny = ["--tiny"] if place.device == "cpu" else []
    script = ROOT / "scripts" / "benchmark.py"
    place.python(script, name, "--model", place.model, "--json", rows, *tiny)
    for row in json.loads(rows.read_text()):
        numbers[row.pop("name")] = row


CHECKS: Mapping[str, Check] = {
    "tests": partial(tests, select="not compile"),
    "smoke": smoke,
    "reference": reference,
    "torch": partial(engine, choice="none"),
    "zero1": partial(engine, choice="zero1"),
    "zero2": partial(engine, choice="zero2"),
    "zero3": partial(engine, choice="zero3"),
    "model": model,
    "trees": trees,
    "decode": partial(benchmark, name="decode"),
    "train": partial(benchmark, name="train"),
    "large": large,
    "compiled": compiled,
}
