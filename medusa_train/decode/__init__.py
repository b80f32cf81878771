"""Layer 2: one cache, one forward and one stopping rule for every decoding method."""

from medusa_train.decode.draft_model import DraftModel
from medusa_train.decode.generation import Generation, Method, generate
from medusa_train.decode.medusa import Medusa
from medusa_train.decode.plain import Plain

__all__ = ["DraftModel", "Generation", "Medusa", "Method", "Plain", "generate"]
