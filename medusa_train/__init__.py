"""Train Medusa heads on a causal language model and measure what they are worth."""

__version__ = "0.1.0"
