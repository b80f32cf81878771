"""Results of made-up answers, for tests of what is said of them."""

from typing import Any

from medusa_train.evaluate.results import build_results
from medusa_train.evaluate.results_schema import ModelInfo, Results


def tiny_model(num_prompts: int, **changes: Any) -> ModelInfo:
    """What results say of a backbone, with these fields changed."""
    fields = {"name": "tiny", "dtype": "float32", "device": "cpu", "parameters": 1, "bytes": 4}
    return ModelInfo(**{**fields, "max_new_tokens": 10, "num_prompts": num_prompts, **changes})


def results_of(measurements: dict[str, Any], model: ModelInfo, **blocks: Any) -> Results:
    """`build_results` with settings that are quick; blocks that are not given are left out."""
    nothing = {"heads": None, "draft": None, "tree": None, "others": {}, "provenance": {}}
    settings = {"gap": lambda *_: 1.5, "bootstrap_samples": 200, "seed": 0}
    return build_results(measurements, model=model, **{**nothing, **settings, **blocks})
