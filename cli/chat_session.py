"""One run of `llmc chat`: open a backend, greet, ask or loop, close the backend."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import Any

from rich.console import Console

from llmc.check.background import BackgroundCheck
from llmc.cli.answer_view import AnswerView
from llmc.cli.chat_backends import Backend, ServerBackend
from llmc.cli.chat_engine import EngineBackend
from llmc.cli.chat_terminal import Terminal, stream_answer, write_stdout
from llmc.cli.console import about_model, note, stderr_console
from llmc.cli.conversation import Conversation, stats_line, why_it_ended
from llmc.cli.loading import load_async_llm
from llmc.cli.typed_ahead import unechoed
from llmc.config import EngineConfig
from llmc.model_info import ModelInfo
from llmc.startup.architecture_certificate import ArchitectureCertificate

# For models whose files recommend no sampling parameters.
_USUAL_SAMPLING = {"temperature": 0.7, "top_p": 0.95}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the user asked for; `question` None means an interactive chat."""

    question: str | None
    system: str | None
    settings: dict[str, Any]
    show_stats: bool | None
    certificate: bool = True
    markdown: bool = True  # on a terminal


def chat_with_engine(config: EngineConfig, ask: Ask) -> int:
    console = stderr_console()
    one_shot_in_a_script = ask.question is not None and not console.is_terminal
    with unechoed():
        llm = load_async_llm(config, console, quiet=one_shot_in_a_script)
    backend = EngineBackend(llm)
    if "temperature" not in llm.info.generation_defaults:
        ask = dataclasses.replace(ask, settings={**_USUAL_SAMPLING, **ask.settings})
    if not one_shot_in_a_script:
        note(console, about_model(llm.info))
    if not backend.has_template:
        note(console, "This model has no chat template: it continues what you write.", "yellow")
    if not ask.certificate or ask.question is not None:  # too short for a background check
        return asyncio.run(_chat(backend, ask, console))
    found: list[ArchitectureCertificate] = []
    with BackgroundCheck(config, llm.info, found.append):
        is_known = bool(found)
        if is_known:
            _warn_of_difference(console, found[0], llm.info)
        code = asyncio.run(_chat(backend, ask, console))
    if found and not is_known:
        _warn_of_difference(console, found[0], llm.info)
    return code


def _warn_of_difference(console: Console, found: ArchitectureCertificate, info: ModelInfo) -> None:
    if found.status == "different" and not info.disabled_passes:
        note(console, str(found), style="yellow")


async def chat_with_server(url: str, model: str | None, api_key: str | None, ask: Ask) -> int:
    backend = await ServerBackend.connect(url, model=model, api_key=api_key)
    return await _chat(backend, ask, stderr_console())


async def _chat(backend: Backend, ask: Ask, console: Console) -> int:
    chat = Conversation(
        model=backend.model,
        context_limit=backend.context_limit,
        system=ask.system,
        settings=ask.settings,
        show_stats=ask.show_stats is not False,
        defaults=backend.defaults,
        models=backend.models,
    )
    try:
        if ask.question is not None:
            await _answer_once(backend, chat, ask, console)
        else:
            # Notes go to stdout, like the answers: both are on the terminal.
            screen = Console(highlight=False)
            note(screen, "/help lists the commands, Ctrl-D exits.")
            await Terminal(backend, chat, screen, markdown=ask.markdown).run()
    finally:
        await backend.close()
    return 0


async def _answer_once(backend: Backend, chat: Conversation, ask: Ask, console: Console) -> None:
    assert ask.question is not None
    chat.ask(ask.question)
    if sys.stdout.isatty():
        screen = Console(highlight=False)
        with unechoed(), AnswerView(screen, markdown=ask.markdown) as view:
            _, stats = await stream_answer(backend, chat, view.write)
    else:
        text, stats = await stream_answer(backend, chat, write_stdout)
        if not text.endswith("\n"):
            write_stdout("\n")
    if ask.show_stats:
        note(console, stats_line(stats, chat.context_limit))
    ended = why_it_ended(stats, chat, is_interactive=False)
    if ended is not None and sys.stdout.isatty():
        note(console, ended, style="yellow")
