"""The methods that a run measures, by the names they have in its results."""

from collections.abc import Mapping

from medusa_train.config.evaluation import AlsoName, EvaluateConfig
from medusa_train.config.schema import Config
from medusa_train.decode import DraftModel, Lookup, Medusa, Method, Plain, Sampling, Typical
from medusa_train.decode.draft_model import MOST
from medusa_train.decode.generation import GREEDY
from medusa_train.decode.lookup import GAMMA as LOOKUP_GAMMA
from medusa_train.decode.medusa import HeadGuesses
from medusa_train.evaluate.method_result import Traits, no_weights
from medusa_train.evaluate.results_schema import AddedWeights, DraftInfo, HeadsInfo
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.tree import Tree

_LOOKUP = no_weights(f"no weights: up to {LOOKUP_GAMMA} tokens that stood behind the same n-gram")


def make_methods(
    config: Config,
    backbone: Backbone,
    heads: MedusaHeads,
    tree: Tree,
    draft: LanguageModel | None,
) -> dict[str, Method]:
    """Every method of a run, by name.

    Args:
        config: the whole run.
        backbone: the target.
        heads: in the dtype they will decode in.
        tree: that they guess along.
        draft: of the same tokenizer; None leaves out the methods of `evaluate.gammas`.
    """
    settings, compiled = config.evaluate, config.decode.compile
    guesses = HeadGuesses(backbone, heads, tree.ranks_by_depth)
    methods: dict[str, Method] = {
        "plain": Plain(backbone, compiled=compiled),
        "medusa": Medusa(backbone, heads, tree, guesses=guesses, compiled=compiled),
    }
    if draft is not None:
        for gamma in sorted(set(settings.gammas)):
            method = DraftModel(backbone, draft, gamma=gamma, compiled=compiled)
            methods[method.name] = method
    for name in settings.also:
        match name:
            case "lookup":
                methods[name] = Lookup(backbone, compiled=compiled)
            case "draft_adaptive":
                assert draft is not None  # else refused before anything was loaded
                gamma = min(settings.gammas)
                methods[name] = DraftModel(
                    backbone, draft, gamma=gamma, adaptive=True, compiled=compiled
                )
            case "medusa_typical":
                methods[name] = Medusa(
                    backbone, heads, tree, guesses=guesses, typical=Typical(), compiled=compiled
                )
    return methods


def samplings(config: Config) -> dict[str, Sampling]:
    """How the methods that are not greedy draw their tokens, by name.

    Where nothing is drawn, typical acceptance would accept what greedy decoding does.
    """
    drawn = Sampling(temperature=config.evaluate.typical_temperature, seed=config.seed)
    return {"medusa_typical": drawn} if "medusa_typical" in config.evaluate.also else {}


def traits_of_others(
    config: Config,
    methods: Mapping[str, Method],
    *,
    heads: HeadsInfo,
    draft: DraftInfo | None,
) -> dict[AlsoName, Traits]:
    """What is known of the methods of `evaluate.also` before they are measured, by name."""
    drawn = samplings(config)
    adds: dict[AlsoName, AddedWeights] = {"lookup": _LOOKUP, "medusa_typical": heads}
    if draft is not None:
        adds["draft_adaptive"] = draft
    return {
        name: Traits(
            adds=adds[name],
            depth=methods[name].longest_block - 1,
            lossy=methods[name].lossy,
            temperature=drawn.get(name, GREEDY).temperature,
        )
        for name in config.evaluate.also
    }


def most_guesses(settings: EvaluateConfig, num_heads: int) -> int:
    """The most tokens that a step of any method guesses, for which the context needs room."""
    most = [num_heads, *settings.gammas]
    if "lookup" in settings.also:
        most.append(LOOKUP_GAMMA)
    if "draft_adaptive" in settings.also:
        most.append(MOST)
    return max(most)
