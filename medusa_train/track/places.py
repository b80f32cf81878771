"""What the files and folders are called that one stage leaves for another."""

HEADS_FOLDER = "heads"  # of medusa1 and medusa2
HEADS_CONFIG = "config.json"
HEADS_WEIGHTS = "medusa_lm_head.safetensors"  # the official name
ADAPTER_FOLDER = "adapter"  # of medusa2
MERGED_FOLDER = "model"  # of medusa2
DRAFT_FOLDER = "model"  # of draft
TREE = "tree.json"  # of evaluate
