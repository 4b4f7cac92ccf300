"""Adapters that are listed, added, removed and set while a server of one model runs."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from qsf.errors import QsfError, shown
from qsf.model import Model
from qsf.native.opening import Adapter
from qsf.serve.api.openai import Adapter as Scale
from qsf.serve.api.openai import scales_of
from qsf.serve.hosts import Hosts
from qsf.serve.http.body import Part
from qsf.serve.http.problems import Problem, invalid

_CLOSED = "adapters cannot be changed: the server was started without --lora-dir DIR"


class Load(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("lora_int_id", "base_model_name", "load_inplace")

    lora_name: Annotated[str, Meta(max_length=100)]
    lora_path: Annotated[str, Meta(max_length=4096)]


class Unload(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("lora_int_id",)

    lora_name: Annotated[str, Meta(max_length=100)]


class Scales(Part):
    lora: Annotated[list[Scale], Meta(max_length=64)]


def listed(hosts: Hosts) -> list[dict[str, Any]]:
    """Return the adapters as llama-server lists them, but no folders of this machine.

    With ``name`` a request chooses one.
    """
    as_opened = [0.0 if each.name else each.scale for each in hosts.adapters]
    scales = hosts.usual_scales or as_opened
    return [
        {"id": i, "path": Path(each.path).name, "name": each.name, "scale": scales[i]}
        for i, each in enumerate(hosts.adapters)
    ]


async def set_scales(hosts: Hosts, fields: Scales) -> list[dict[str, Any]]:
    """Set the scales of requests that choose no adapter; of those that are not named 0."""
    _folder(hosts)
    hosts.usual_scales = scales_of(fields.lora, hosts.adapters) or None
    return listed(hosts)


async def load(hosts: Hosts, fields: Load) -> str:
    """Add an adapter of the folder that the owner named."""
    folder, name = _folder(hosts), fields.lora_name
    try:
        path = (folder / fields.lora_path).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, no text for a name, links in a circle
        path, is_file = folder, False
    if not re.fullmatch(r"[\w.-]+", name):
        raise invalid("lora_name", f"lora_name must be letters, digits, . - _, not {shown(name)}")
    if not path.is_relative_to(folder):
        text = f"{shown(fields.lora_path)} is not in the folder of --lora-dir"
        raise Problem(403, "not_allowed", text, param="lora_path")
    if not is_file:
        text = f"there is no file {shown(fields.lora_path)} in the folder of --lora-dir"
        raise Problem(404, "not_found", text, param="lora_path")

    def add(adapters: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
        if hosts.knows(name):
            raise invalid("lora_name", f"a model or an adapter is called {name} already")
        added = (*adapters, Adapter(str(path), 1.0, name))
        for model in hosts.paths.values():  # refuses a file that does not fit while all goes on
            Model.plan(model, lora=[each.text for each in added], ram_budget=None)
        return added

    try:
        await hosts.reopen(add)
    except QsfError as error:
        text = str(error).replace(f"{folder}/", "")
        for model in hosts.paths.values():
            text = text.replace(str(model), model.name)
        raise Problem(400, "not_loaded", text, param="lora_path") from error
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload(hosts: Hosts, fields: Unload) -> str:
    _folder(hosts)

    def remove(adapters: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
        left = tuple(each for each in adapters if each.name != fields.lora_name)
        if not fields.lora_name or left == adapters:
            text = f"there is no adapter {shown(fields.lora_name)}"
            raise Problem(404, "not_found", text, param="lora_name")
        return left

    await hosts.reopen(remove)
    return f"Success: LoRA adapter '{fields.lora_name}' removed successfully."


def _folder(hosts: Hosts) -> Path:
    if hosts.adapter_folder is None:
        raise Problem(403, "not_allowed", _CLOSED)
    return hosts.adapter_folder.resolve()
