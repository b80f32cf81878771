"""Layer 2: one cache, one forward and one stopping rule for every decoding method."""

from medusa_train.decode.draft_model import DraftModel
from medusa_train.decode.generation import Generation, Part, generate, generate_batch, stream
from medusa_train.decode.lookup import Lookup
from medusa_train.decode.medusa import Medusa, Typical
from medusa_train.decode.method import Method
from medusa_train.decode.plain import Plain
from medusa_train.decode.stopping import StopStrings
from medusa_train.ops.sample import Sampling

__all__ = [
    "DraftModel",
    "Generation",
    "Lookup",
    "Medusa",
    "Method",
    "Part",
    "Plain",
    "Sampling",
    "StopStrings",
    "Typical",
    "generate",
    "generate_batch",
    "stream",
]
