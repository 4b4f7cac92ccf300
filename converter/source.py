"""A model as it is handed to the converter: configuration, weights, tokenizer, chat template."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsf.converter import metadata
from qsf.converter.architectures import Facts, Family, family_of, read_facts
from qsf.converter.checkpoint import Checkpoint
from qsf.converter.checkpoint_safetensors import SafetensorsCheckpoint
from qsf.errors import QsfConversionError, QsfIOError


@dataclass(frozen=True, slots=True)
class Source:
    """Everything that a file is made of. The checkpoint is open as long as its context."""

    path: Path
    config: dict[str, Any]  # as config.json has it
    family: Family
    facts: Facts
    checkpoint: Checkpoint
    tokenizer: bytes | None  # tokenizer.json
    chat: bytes  # the CHAT section

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that belong to it: none of them may be overwritten."""
        return (*self.checkpoint.paths, *self.path.glob("*.json"))


@contextlib.contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a HuggingFace model directory.

    Raises QsfConversionError when it holds no model that can be converted, QsfIOError when the
    system refuses to read.
    """
    config = _read_config(path)
    family = family_of(config)
    ids = metadata.token_ids(metadata.generation_config(path))
    facts = read_facts(family, {**config, **ids, **metadata.token_ids(config)})
    with SafetensorsCheckpoint(path) as checkpoint:
        yield Source(
            path=path,
            config=config,
            family=family,
            facts=facts,
            checkpoint=checkpoint,
            tokenizer=metadata.tokenizer_bytes(path),
            chat=metadata.chat_bytes(path, config),
        )


def _read_config(model_dir: Path) -> dict[str, Any]:
    if not model_dir.exists():
        raise QsfIOError(f"{model_dir}: no such directory")
    if not model_dir.is_dir():
        raise QsfConversionError(f"{model_dir}: a model directory is expected, not a file")
    config = metadata.read_json_object(model_dir / "config.json")
    if config is None:
        raise QsfConversionError(f"{model_dir}: no config.json; is it a HuggingFace model?")
    return config
