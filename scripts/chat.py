"""Chat with a model that you trained, on one device.

python scripts/chat.py outputs/finetune/RUN                            # the newest checkpoint, or the export
python scripts/chat.py outputs/finetune/RUN/checkpoints/step_200       # this checkpoint, on any mesh
python scripts/chat.py outputs/finetune/RUN/export --temperature 0.8 --top-p 0.9 --system "Answer briefly."
python scripts/chat.py outputs/finetune/RUN/adapter --device cpu       # a PEFT adapter, on the base model that it names
echo "What is a list?" | python scripts/chat.py outputs/finetune/RUN   # a turn per line, only the answers on stdout

Messages are formatted with the chat template of the model's tokenizer. Tokens appear as they are generated: greedily,
as a run's own generations, or sampled with --temperature. A tokenizer without a template continues each message as
plain text, without the turns before. /reset forgets the turns, /system TEXT sets the system message (without a text it
removes it), /exit or Ctrl-D ends the chat. Ctrl-C stops an answer, and ends the chat at the prompt. Exit status 0, 130
after Ctrl-C, or 2 for an invalid command line or model.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser, Namespace
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.launch.machine import visible_gpus
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError, raise_all
from components.protocol.failures import print_problems
from components.terminal import HelpText, exit_with
from scripts._chat.answer_screen import Screen, TerminalScreen, open_screen
from scripts._chat.chat_source import find_source

if TYPE_CHECKING:
    from scripts._chat.conversation import Conversation

RESET, SYSTEM, EXIT = "/reset", "/system", "/exit"
DEVICES = ("auto", "cpu", "cuda")


def read_options(arguments: list[str]) -> Namespace:
    """Parse and validate the options. Raises ConfigError."""
    parser = ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=HelpText)
    parser.add_argument("model", type=Path, metavar="RUN", help="run directory, checkpoint, export or adapter")
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one; default), cpu or cuda")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the most likely tokens of this share")
    parser.add_argument("--top-k", type=int, default=0, help="sample from this many most likely tokens; 0: from all")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="most tokens of an answer (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampled tokens (default: 0)")
    parser.add_argument("--system", metavar="TEXT", help="system message; empty: none (default: data.system_prompt)")
    parser.add_argument("--chat-template", metavar="NAME", help="as model.chat_template (default: that of the run)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model's repository")
    options = parser.parse_args(arguments)
    raise_all(_option_problems(options))
    return options


def _option_problems(options: Namespace) -> list[str]:
    problems = []
    if options.device not in DEVICES:
        problems.append(f"--device {options.device}: must be one of {', '.join(DEVICES)}")
    if options.device == "cuda" and not visible_gpus(os.environ):
        problems.append("--device cuda: no GPU is visible to this process; use --device cpu")
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        problems.append(f"--temperature {options.temperature:g}: must be a finite number of at least 0")
    if not 0 < options.top_p <= 1:
        problems.append(f"--top-p {options.top_p:g}: must be greater than 0 and at most 1")
    if options.top_k < 0:
        problems.append(f"--top-k {options.top_k}: must be at least 0; 0 samples from all tokens")
    if options.temperature == 0:
        problems += [
            f"--{name} {value:g}: has no effect without sampling; add --temperature 0.8, or leave it out"
            for name, value, default in (("top-p", options.top_p, 1), ("top-k", options.top_k, 0))
            if value != default
        ]
    if options.max_new_tokens < 1:
        problems.append(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if not 0 <= options.seed < 2**32:
        problems.append(f"--seed {options.seed}: must be in [0, 2**32 - 1]")
    return problems


def chat(options: Namespace, screen: Screen) -> None:
    """Load the model, and answer until the input ends. Raises ConfigError."""
    source = find_source(options.model, trust_remote_code=options.trust_remote_code)
    if options.chat_template is not None:
        source = replace(source, model=replace(source.model, chat_template=options.chat_template))

    with screen.loading():
        import torch

        from components import models
        from components.chat_template import ChatTemplate
        from scripts._chat.chat_model import load_chat_model
        from scripts._chat.conversation import Conversation

        uses_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
        loaded = load_chat_model(source, torch.device("cuda" if uses_gpu else "cpu"))
        sampling = models.Sampling(options.temperature, options.top_p, options.seed, options.top_k)
        conversation = Conversation(loaded, sampling, options.max_new_tokens)
        if conversation.has_template:
            ChatTemplate(loaded.tokenizer).source(None)  # rejects several templates without a default one
        system = source.system if options.system is None else options.system
        conversation.set_system(system)
    screen.heading(loaded.title)
    if system and options.system is None:
        screen.note(f"system message of the run: {system}")
    for note in loaded.notes:
        screen.note(note)
    if not conversation.has_template:
        screen.note("no chat template: each message is continued as plain text, without the turns before")
    for message in screen.messages():
        command, _, text = message.strip().partition(" ")
        if command == EXIT:
            return
        if command.startswith("/"):
            _obey(command, text.strip(), conversation, screen)
        elif command:
            _answer(message, conversation, screen)


def _obey(command: str, text: str, conversation: Conversation, screen: Screen) -> None:
    """Follow a command other than /exit."""
    if command == RESET and not text:
        conversation.reset()
        screen.note("the turns are forgotten")
    elif command == SYSTEM:
        try:
            conversation.set_system(text)
        except ConfigError as error:
            screen.problem(str(error))
        else:
            screen.note("the system message is set" if text else "there is no system message")
    else:
        screen.problem(f"{command} {text}".strip() + f": no such command; use {RESET}, {SYSTEM} TEXT or {EXIT}")


def _answer(message: str, conversation: Conversation, screen: Screen) -> None:
    """Print the answer to a message while it is generated; on a terminal, Ctrl-C stops it."""
    screen.begin()
    with closing(conversation.answer(message)) as pieces:
        try:
            for piece in pieces:
                screen.write(piece)
        except ConfigError as error:
            screen.problem(str(error))
            return
        except KeyboardInterrupt:
            screen.end("stopped")
            if not isinstance(screen, TerminalScreen):
                raise
            return
    screen.end(conversation.cut)


def main(arguments: list[str]) -> int:
    """Chat, and return the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        chat(read_options(arguments), open_screen())
    except ConfigError as error:
        print_problems([problem.replace("model.chat_template", "--chat-template") for problem in error.problems])
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    exit_with(main)
