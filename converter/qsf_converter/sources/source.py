"""The input of a conversion: configuration, weights, tokenizer, chat template."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsf.errors import QsfConversionError, QsfIOError
from qsf.foreign_json import read_json
from qsf.text.render import one_process
from qsf_converter import sources
from qsf_converter.sources import checkpoint_safetensors, embedding, metadata, quantised
from qsf_converter.sources.adapters import Adapter, merged, open_adapter
from qsf_converter.sources.architectures import family_of, read_facts
from qsf_converter.sources.checkpoint import KEPT, Checkpoint, DerivedCheckpoint, padded, to_float32
from qsf_converter.sources.checkpoint_files import shards_of
from qsf_converter.sources.checkpoint_gguf import GgufCheckpoint, LeastType
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.checkpoint_torch import TorchCheckpoint
from qsf_converter.sources.embedding import is_classifier, with_classifier, with_dense_of_folder
from qsf_converter.sources.families.family import Facts, Family
from qsf_converter.sources.folder_tokenizer import tokenizer_of_folder
from qsf_converter.sources.gguf_config import FILE_TYPES
from qsf_converter.sources.gguf_file import MAGIC
from qsf_converter.sources.gguf_tokenizer import chat_of, tokenizer_of
from qsf_converter.sources.metadata import Origin
from qsf_converter.sources.usable import usable_chat, usable_generation, usable_tokenizer

_MAX_NAME_CHARS = 200
_MASTER_WEIGHTS = (
    "the model computes with ternary weights: --quant-type ternary --ternary-rule absmean rounds "
    "these as it does"
)


@dataclass(frozen=True, slots=True)
class Source:
    """All inputs of a file. The checkpoint is open until its context ends."""

    path: Path
    config: dict[str, Any]  # fields of config.json
    family: Family
    facts: Facts
    checkpoint: Checkpoint
    tokenizer: bytes | None  # tokenizer.json
    chat: bytes  # the CHAT section
    origin: Origin  # for the META section
    template_fault: str | None = None  # why the chat template is left out
    least_type: LeastType | None = None  # of a quantised source
    keeps: bool = False  # matrices can be stored unchanged
    unkept_type: LeastType | None = None  # of its other matrices
    is_ternary: bool = False  # the layers' matrices are already ternary
    adapters: tuple[Adapter, ...] = ()  # merged into the checkpoint

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the source: no output may overwrite one of them."""
        of_adapters = (path for adapter in self.adapters for path in adapter.paths)
        return (*self.checkpoint.paths, *self.path.glob("*.json"), *of_adapters)

    def require_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise QsfConversionError(
                f"{self.path}: {self.tokenizer_fault}; "
                "with --allow-no-tokenizer a file for token ids only is written"
            )

    def require_template(self) -> None:
        if self.template_fault is not None:
            raise QsfConversionError(
                f"{self.path}: {self.template_fault}; with --allow-no-template the file is written "
                "without it, and continues texts instead of answering"
            )

    @property
    def tokenizer_fault(self) -> str:
        """The reason why there is no usable tokenizer; only set if there is none."""
        return next(text for text in reversed(self.facts.warnings) if "tokenizer" in text)


@contextlib.contextmanager
def open_source(path: Path, adapters: Sequence[str] = ()) -> Iterator[Source]:
    """Open a HuggingFace model directory, or a GGUF file, with adapters (``open_adapter``) merged.

    Of a directory's weights safetensors are preferred to those of torch.save. Raises
    QsfConversionError when there is no model that can be converted, QsfIOError when the system
    refuses to read.
    """
    try:
        if not path.exists():
            raise QsfIOError(f"{path}: no such directory")
        is_dir = path.is_dir()
    except PermissionError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        opened = tuple(stack.enter_context(open_adapter(text)) for text in adapters)
        source = stack.enter_context((_open_directory if is_dir else _open_gguf)(path, opened))
        yield source


@contextlib.contextmanager
def _open_directory(path: Path, adapters: tuple[Adapter, ...]) -> Iterator[Source]:
    config = metadata.read_json_object(path / "config.json")
    if config is None:
        raise QsfConversionError(
            f"{path}: no config.json; is it a HuggingFace model?{_gguf_hint(path)}"
        )
    family = family_of(config)
    generation, left_out = usable_generation(metadata.generation_config(path))
    chat, more, template_fault = usable_chat(
        metadata.chat_bytes(path, config, generation),
        embedding.of_folder(path, has_head=family.has_head),
    )
    left_out += more
    ids = metadata.token_ids(read_json(chat)["generation"])
    method = quantised.method_of(config, path)
    is_ternary = method is not None and method.is_ternary
    values = quantised.without_method({**config, **ids, **metadata.token_ids(config)})
    if method is not None and method.is_bitnet and not is_ternary:
        left_out += (_MASTER_WEIGHTS,)
    if family.scalars:
        with _open_weights(path) as stored:
            values |= _scalars(family, stored)
    facts = read_facts(family, values)
    tokenizer = metadata.tokenizer_bytes(path)
    if tokenizer is None:
        tokenizer, said = tokenizer_of_folder(path, config)
        left_out += (said,)
    with _open_weights(path) as stored:
        checkpoint = quantised.dequantised(stored, method)
        origin = metadata.origin_of(path)
        origin = dataclasses.replace(origin, stored=quantised.storage_of(checkpoint, method))
        source = Source(
            path=path,
            config=config,
            family=family,
            facts=facts,
            checkpoint=checkpoint,
            tokenizer=tokenizer,
            chat=chat,
            template_fault=template_fault,
            origin=origin,
            is_ternary=is_ternary,
            keeps=any(tensor.dtype in KEPT for tensor in checkpoint.tensors.values()),
            adapters=adapters,
        )
        yield _completed(source, left_out, lambda stored: with_dense_of_folder(stored, path))


def _completed(
    source: Source, warnings: tuple[str, ...], with_dense: Callable[[Checkpoint], Checkpoint]
) -> Source:
    """Return the source with what follows from its parts: heads, zeros, ends of turns, warnings."""
    source = _with_adapters(source) if source.adapters else source
    checkpoint, chat, tokenizer = source.checkpoint, source.chat, source.tokenizer
    if is_classifier(source.family):
        checkpoint, head = with_classifier(checkpoint, source.family, source.config)
        chat = embedding.with_settings(chat, head)
    elif source.facts.arch.is_encoder:
        checkpoint = with_dense(checkpoint)
    if tokenizer is not None:
        tokenizer, chat, left_out = usable_tokenizer(tokenizer, source.facts.header, chat)
        warnings += left_out
    facts = dataclasses.replace(source.facts, warnings=(*source.facts.warnings, *warnings))
    if source.family.derive is not None:
        checkpoint = DerivedCheckpoint(checkpoint, source.family.derive(checkpoint, facts))
    checkpoint = padded(checkpoint, facts.padded)
    return dataclasses.replace(
        source, facts=facts, checkpoint=checkpoint, tokenizer=tokenizer, chat=chat
    )


def _with_adapters(source: Source) -> Source:
    """Return the source with its adapters merged: what they change has f32, so no stored type."""
    checkpoint = merged(source.checkpoint, source.adapters, source.family, source.facts)
    return dataclasses.replace(
        source,
        checkpoint=checkpoint,
        keeps=any(tensor.dtype in KEPT for tensor in checkpoint.tensors.values()),
        is_ternary=False,
    )


def _open_weights(path: Path) -> SafetensorsCheckpoint | TorchCheckpoint:
    formats = (
        (SafetensorsCheckpoint, checkpoint_safetensors),
        (TorchCheckpoint, sources.checkpoint_torch),
    )
    for opener, module in formats:
        names = (module.SINGLE_NAME, module.INDEX_NAME)
        if any((path / name).exists() for name in names) or shards_of(path / module.SINGLE_NAME):
            return opener(path)
    wanted = ", ".join(name for _, m in formats for name in (m.SINGLE_NAME, m.INDEX_NAME))
    others = sorted(
        file.name
        for pattern in ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf")
        for file in path.glob(pattern)
    )
    there = f"; there are {', '.join(others[:4])}" if others else ""
    raise QsfConversionError(f"{path}: no weights: none of {wanted}{there}{_gguf_hint(path)}")


def _scalars(family: Family, stored: Checkpoint) -> dict[str, list[float]]:
    """Return the numbers of the layers that are tensors of their own, as GGUF's metadata."""
    found: dict[str, list[float]] = {key: [] for key in family.scalars}
    for key, source in family.scalars.items():
        name = f"{family.prefixes[0]}{source}"
        while (here := name.format(layer=len(found[key]))) in stored.tensors:
            found[key].append(float(to_float32(stored.read_rows(here, 0, 1)).ravel()[0]))
    return found


def _gguf_hint(path: Path) -> str:
    files = sorted(file.name for file in path.glob("*.gguf"))
    return f"; to convert {files[0]}, name the file itself" if files else ""


@contextlib.contextmanager
def _open_gguf(path: Path, adapters: tuple[Adapter, ...]) -> Iterator[Source]:
    if path.suffix.lower() != ".gguf" and not _is_gguf(path):
        raise QsfConversionError(
            f"{path}: a model directory or a GGUF file is expected, not a file of another kind"
        )
    with GgufCheckpoint(path) as checkpoint:
        try:
            facts = read_facts(checkpoint.family, checkpoint.config)
        except QsfConversionError as error:
            raise QsfConversionError(f"{path}: its metadata, as {error}") from error
        yield _source_of_gguf(path, checkpoint, facts, adapters)


@one_process()
def _source_of_gguf(
    path: Path, checkpoint: GgufCheckpoint, facts: Facts, adapters: tuple[Adapter, ...]
) -> Source:
    fields = checkpoint.head.metadata
    with ThreadPoolExecutor(1) as beside:  # the template is tried in another process
        trial = beside.submit(
            usable_chat,
            chat_of(fields, metadata.token_ids(checkpoint.config)),
            embedding.of_gguf(fields, has_head=checkpoint.family.has_head),
        )
        tokenizer, reason = tokenizer_of(fields)
        chat, left_out, template_fault = trial.result()
    source = Source(
        path=path,
        config=checkpoint.config,
        family=checkpoint.family,
        facts=facts,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        chat=chat,
        template_fault=template_fault,
        least_type=checkpoint.least_type,
        keeps=checkpoint.keeps,
        unkept_type=checkpoint.unkept_type,
        adapters=adapters,
        origin=Origin(
            name=_text(fields, "general.name") or metadata.file_name(path.stem),
            config_sha256=checkpoint.head.metadata_sha256,
            licence=_text(fields, "general.license"),
            type_name=FILE_TYPES.get(fields.get("general.file_type"), ""),
        ),
    )
    reasons = (reason,) if reason else ()
    warnings = (*checkpoint.warnings, *left_out, *reasons)
    return _completed(source, warnings, embedding.with_dense_of_gguf)


def _is_gguf(path: Path) -> bool:
    try:
        with metadata.open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error


def _text(fields: sources.gguf_config.Metadata, key: str) -> str | None:
    value = fields.get(key)
    return value[:_MAX_NAME_CHARS] if isinstance(value, str) and value else None
