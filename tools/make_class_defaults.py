# SPDX-License-Identifier: Apache-2.0
"""Write what transformers' classes of configurations take for keys that a config.json leaves out.

Run from the project root with the optional extra `golden` installed:

    python tools/make_class_defaults.py [more keys]

The file converter/qsf_converter/sources/families/class_defaults.json has a row for each family, by
the general names of its keys; those that a row has are looked for in every class, and so are the
keys of the command line. Sizes that every file states have no default; a table of the families may
say otherwise than its class.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qsf_converter.sources.architectures import FAMILIES
from qsf_converter.sources.families.family import CLASS_DEFAULTS, Family

_USUAL = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}  # without being said


def row(family: Family, keys: set[str]) -> dict[str, Any]:
    """Return the defaults of a family's class."""
    made = CONFIG_MAPPING[family.model_type]
    stated = {field.name: field.default for field in dataclasses.fields(made)}
    found: dict[str, Any] = {}
    for key in keys - {"rope_parameters"}:
        names = [family.renames.get(key, key), key]
        names += [made.attribute_map.get(name) for name in names]
        value = next((stated[name] for name in names if name in stated), None)
        if isinstance(value, (int, float, str)):
            found[key] = value
    if found.get("num_key_value_heads") == stated.get("num_attention_heads"):
        found.pop("num_key_value_heads", None)  # as many as heads, however many these are
    rope = made().to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") == "default":
        found |= {key: rope[key] for key, usual in _USUAL.items() if rope.get(key, usual) != usual}
    elif "default" not in str(rope) or "proportional" in str(rope):
        found |= {"rope_parameters": rope} if rope else {}
    return found


def main(more: list[str]) -> None:
    """Write the file."""
    keys = {key for own in json.loads(CLASS_DEFAULTS.read_text("utf-8")).values() for key in own}
    rows = {name: row(family, keys | {*more}) for name, family in FAMILIES.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(own, sort_keys=True)}" for name, own in rows.items())
    CLASS_DEFAULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
