"""What methods are called where people read of them; a lossy one always with that word."""

from medusa_train.config.evaluation import AlsoName
from medusa_train.evaluate.results_schema import MethodResult, Results

_OTHERS: dict[AlsoName, str] = {
    "lookup": "prompt lookup",
    "draft_adaptive": "draft model with adaptive gamma",
    "medusa_typical": "Medusa with typical acceptance",
}


def named_methods(results: Results) -> list[tuple[str, MethodResult]]:
    """All that were measured, by name: plain decoding first, those of `evaluate.also` last."""
    methods = results.methods
    found: list[tuple[str, MethodResult]] = [("plain", methods.plain)]
    if methods.draft_model is not None:
        found.append((f"draft model, gamma {methods.draft_model.gamma}", methods.draft_model))
    if methods.medusa is not None:
        found.append((f"Medusa, {methods.medusa.tree_nodes} nodes", methods.medusa))
    return found + [(other_name(key, method), method) for key, method in methods.others.items()]


def other_name(key: AlsoName, method: MethodResult) -> str:
    """Of a method of `evaluate.also`, by its key in the results."""
    return _OTHERS[key] + (" (lossy)" if method.lossy else "")
