"""`llmc chat`: chat with a model on the terminal, or ask one question.

words, stdin, --quick --> one answer on stdout            chat_terminal --> conversation
a terminal            --> the interactive loop                 |
--url                 --> a server instead of an engine   chat_backends, chat_engine
"""

from __future__ import annotations

import dataclasses
import os
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmc.cli.options import engine_options, option
from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.startup.default_model import default_model
from llmc.startup.hub import HubName
from llmc.weights.gguf.files import is_gguf_file

CHAT_PANEL = "Chat"
SAMPLING_PANEL = "Sampling"


def is_model_word(word: str) -> bool:
    """Whether a bare word is a model: a directory, path, .gguf file, hub id or the default."""
    if word == default_model().name or word.startswith(("./", "../", "/", "~")):
        return True
    if os.path.isdir(word) or is_gguf_file(Path(word)):
        return True
    return HubName.parse(word) is not None


def read_piped_stdin() -> str:
    """All of stdin if it is a file or a pipe; otherwise an empty string."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or replaced by a test
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    try:
        text = sys.stdin.read()
        text.encode()  # bytes that are no text are surrogates in some locales
    except UnicodeError:
        raise ConfigError(
            "stdin is not UTF-8 text; only a question in text can be piped in"
        ) from None
    return text


def find_question(words: list[str], quick: str | None) -> str | None:
    """The question, joined from the command line and stdin; None if there is none."""
    parts = [" ".join(words), quick or ""]
    if not sys.stdin.isatty():
        parts.append(read_piped_stdin().strip())
    question = "\n\n".join(part for part in parts if part)
    if question:
        return question
    if quick is not None:
        raise ConfigError("--quick needs a question")
    if not sys.stdin.isatty():
        raise ConfigError(
            "no question was given: write it on the command line or pipe it in "
            "(an interactive chat needs a terminal)"
        )
    return None


@engine_options(positional_model=False)
def command(
    config: EngineConfig,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] QUESTION",
            help="A question to answer before exiting. If the first word is a directory, a path "
            "or a hub id (owner/name), it is the model.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        str | None,
        option(
            "--quick",
            "-q",
            help="Ask this one question and exit.",
            metavar="QUESTION",
            panel=CHAT_PANEL,
        ),
    ] = None,
    system: Annotated[
        str | None,
        option("--system", "--system-prompt", help="System prompt.", panel=CHAT_PANEL),
    ] = None,
    stats: Annotated[
        bool | None,
        option(
            "--stats/--no-stats",
            help="Show speed and token counts after each answer. "
            "Default: only in the interactive chat.",
            panel=CHAT_PANEL,
        ),
    ] = None,
    markdown: Annotated[
        bool,
        option(
            "--markdown/--no-markdown",
            help="Render answers as Markdown on a terminal, or show them as plain text.",
            panel=CHAT_PANEL,
        ),
    ] = True,
    certificate: Annotated[
        bool,
        option(
            "--certificate/--no-certificate",
            help="In an interactive chat, compare a small model of this architecture with "
            "transformers in the background, once per version.",
            panel=CHAT_PANEL,
        ),
    ] = True,
    url: Annotated[
        str | None,
        option(
            "--url",
            help="Chat with this OpenAI-compatible server instead. --model selects one of its "
            "models; other engine options are ignored.",
            panel=CHAT_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        str | None, option("--api-key", help="API key for --url.", panel=CHAT_PANEL)
    ] = None,
    temperature: Annotated[
        float | None,
        option("--temperature", help="0 is greedy.", metavar="NUMBER", panel=SAMPLING_PANEL),
    ] = None,
    top_p: Annotated[
        float | None,
        option(
            "--top-p",
            help="Sample from the most likely tokens that together have this probability.",
            metavar="SHARE",
            panel=SAMPLING_PANEL,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        option(
            "--top-k",
            help="Sample from the k most likely tokens.",
            metavar="TOKENS",
            panel=SAMPLING_PANEL,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        option(
            "--min-p",
            help="Drop tokens below this share of the top probability.",
            metavar="SHARE",
            panel=SAMPLING_PANEL,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        option(
            "--max-tokens",
            metavar="TOKENS",
            help="Maximum number of tokens in an answer. Default: as many as fit.",
            panel=SAMPLING_PANEL,
        ),
    ] = None,
    stop: Annotated[
        str | None, option("--stop", help="Text that ends an answer.", panel=SAMPLING_PANEL)
    ] = None,
) -> int:
    """Chat with a model interactively, or ask one question from the command line or stdin.

    In the chat, /help lists the commands.
    """
    words = list(words or ())
    if words and config.model is None and url is None and is_model_word(words[0]):
        config = dataclasses.replace(config, model=words.pop(0))
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "max_tokens": max_tokens,
        "stop": stop,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    question = find_question(words, quick)
    from llmc.cli.conversation import check_settings

    check_settings(settings)  # before spending time on loading a model
    from llmc.cli.chat_session import Ask, chat_with_engine, chat_with_server

    ask = Ask(
        question=question,
        system=system,
        settings=settings,
        show_stats=stats,
        certificate=certificate,
        markdown=markdown,
    )
    if url is not None:
        import asyncio  # here, since importing it takes a tenth of the time of --help

        return asyncio.run(chat_with_server(url, config.model, api_key, ask))
    if config.max_num_seqs == EngineConfig().max_num_seqs:  # a chat sends one request at a time
        config = dataclasses.replace(config, max_num_seqs=1)
    return chat_with_engine(config, ask)
