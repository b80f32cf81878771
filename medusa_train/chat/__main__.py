"""`python -m medusa_train.chat HEADS_DIR`: options, errors as sentences, exit status."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from medusa_train.chat.finding import find_heads
from medusa_train.config.training import DTypeName
from medusa_train.errors import ConfigError, MedusaError


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the person leaves; gives the exit status."""
    options = parser().parse_args(argv)
    try:
        _chat(options)
    except MedusaError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        return 130
    except BrokenPipeError:
        # Nobody reads on; the interpreter would try once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m medusa_train.chat",
        description="Chat with a model and see which tokens its heads have guessed.",
        epilog="Without a terminal each line of the input is a question, and plain answers go to "
        "standard output. There too a line that begins with / is a command, unless a space stands "
        "before it; one that is unknown or fails ends the chat with status 1.",
    )
    found.add_argument("heads", metavar="HEADS_DIR", type=Path, help="a run, a stage, or its heads")
    found.add_argument("--model", help="the backbone (default: the one the heads were trained on)")
    found.add_argument("--tree", metavar="FILE", type=Path, help="default: that of evaluate")
    found.add_argument("--method", choices=("medusa", "plain", "lookup"), default="medusa")
    found.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    found.add_argument("--top-p", type=float, default=1.0)
    found.add_argument("--top-k", type=int, default=0, help="0, the default, keeps all")
    found.add_argument("--max-new-tokens", type=int, default=512, help="of an answer")
    found.add_argument("--system", metavar="TEXT", help="system prompt")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--dtype", choices=get_args(DTypeName))
    found.add_argument("--device", help="auto (the default), cpu, cuda, cuda:1, ...")
    return found


def _chat(options: argparse.Namespace) -> None:
    heads = find_heads(options.heads)
    # torch is slow to import: --help and a folder without heads need none of it
    from medusa_train.chat.loading import backbone_settings, choose_method
    from medusa_train.chat.screen import open_screen
    from medusa_train.chat.session import AnswerSettings, Chat
    from medusa_train.decode import Sampling
    from medusa_train.model.backbone import load_backbone
    from medusa_train.model.device import dtype_name

    try:
        sampling = Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
        )
        settings = AnswerSettings(max_new_tokens=options.max_new_tokens, sampling=sampling)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    wanted = backbone_settings(
        heads, model=options.model, dtype=options.dtype, device=options.device
    )
    screen = open_screen()
    screen.note(f"loading {wanted.name}")
    backbone = load_backbone(wanted)
    guesser = choose_method(options.method, backbone, heads, options.tree)
    chat = Chat(backbone, guesser.method, screen, settings, system=options.system)
    screen.note(f"{guesser.described}, in {dtype_name(backbone.dtype)} on {backbone.device}")
    screen.note("/help lists commands, Ctrl-D leaves")
    if guesser.name is not None:
        screen.legend(guesser.name)
    chat.run()


if __name__ == "__main__":
    sys.exit(main())
