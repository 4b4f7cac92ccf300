"""A plugin for llm (https://llm.datasette.io): every .qsf file in a folder is a model.

llm install examples/llm-qsf
export QSF_MODELS=~/models QSF_BUDGET=400        # folder; MB, or auto
llm -m qsf/mistral "Why is the sky blue?"
llm chat -m qsf/mistral -o temperature 0.2
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llm
from pydantic import Field

import qsf


@cache
def opened(path: Path) -> qsf.Model:
    """Open a file once for all prompts of a process."""
    budget = os.environ.get("QSF_BUDGET", "auto")
    return qsf.Model(path, ram_budget=int(budget) if budget.isdigit() else budget)


@llm.hookimpl
def register_models(register: Any) -> None:
    """Tell llm of the files in the folder QSF_MODELS."""
    for path in sorted(Path(os.environ.get("QSF_MODELS", ".")).expanduser().glob("*.qsf")):
        register(QsfModel(path))


class QsfModel(llm.Model):
    """One .qsf file."""

    can_stream = True

    class Options(llm.Options):
        """What ``llm -o NAME VALUE`` takes."""

        max_tokens: int = Field(256, description="At most so many tokens")
        temperature: float | None = Field(None, description="0: always the most probable token")
        seed: int | None = Field(None, description="The same seed gives the same text")

    def __init__(self, path: Path) -> None:
        """Name the model after its file; it is opened by the first prompt."""
        self.model_id = f"qsf/{path.stem}"
        self.path = path

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any = None
    ) -> Iterator[str]:
        """Yield the answer in pieces; llm keeps the conversation."""
        model = opened(self.path)
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for turn in conversation.responses if conversation is not None else ():
            messages.append({"role": "user", "content": turn.prompt.prompt})
            messages.append({"role": "assistant", "content": turn.text()})
        messages.append({"role": "user", "content": prompt.prompt})
        yield from model.chat(messages, **prompt.options.model_dump())
        if model.stats is not None:
            response.set_usage(input=model.stats.prompt_tokens, output=model.stats.generated_tokens)
