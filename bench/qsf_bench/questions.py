"""Count right answers to 200 generated questions: arithmetic, copying, lookup in a text, and JSON.

Questions are the same in every call, and answers are greedy: what differs between two files of one
model comes from their weights.

Usage: python -m qsf_bench.questions MODEL.qsf...
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import qsf

N_OF_KIND = 50
_ANSWER_TOKENS = 48
_SESSIONS = 8
_NAMES = ("Ada", "Boris", "Chen", "Dina", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun")
_TOWNS = ("Lisbon", "Oslo", "Quito", "Kyoto", "Cairo", "Perth", "Riga", "Turin", "Lima", "Bergen")
_THINGS = ("lamp", "kettle", "violin", "bicycle", "compass", "ladder", "mirror", "basket")


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    wanted: str

    def is_right(self, answer: str) -> bool:
        if self.kind == "arithmetic":
            return re.findall(r"-?\d+", answer)[-1:] == [self.wanted]
        if self.kind == "copying":
            return answer.strip("` \n") == self.wanted
        if self.kind == "lookup":
            return [town for town in _TOWNS if town in answer] == [self.wanted]
        found = re.search(r"\{.*?\}", answer, re.DOTALL)
        try:
            return found is not None and bool(json.loads(found[0]) == json.loads(self.wanted))
        except ValueError:
            return False


def questions() -> Iterator[Question]:
    """Yield `N_OF_KIND` of each kind, in turns."""
    rng = random.Random(48)
    for _ in range(N_OF_KIND):
        yield from (_arithmetic(rng), _copying(rng), _lookup(rng), _json(rng))


def _arithmetic(rng: random.Random) -> Question:
    a, b, sign = rng.randint(11, 99), rng.randint(11, 99), rng.choice("+-*")
    b = rng.randint(2, 9) if sign == "*" else b
    wanted = {"+": a + b, "-": a - b, "*": a * b}[sign]
    text = f"What is {a} {sign} {b}? Answer with the number only."
    return Question("arithmetic", text, str(wanted))


def _copying(rng: random.Random) -> Question:
    characters = "bcdfghjkmnpqrstvwxz23456789"
    line = " ".join("".join(rng.choices(characters, k=rng.randint(3, 6))) for _ in range(5))
    return Question("copying", f"Repeat this line exactly, and write nothing else:\n{line}", line)


def _lookup(rng: random.Random) -> Question:
    names, towns = rng.sample(_NAMES, 6), rng.sample(_TOWNS, 6)
    facts = [
        f"{name} lives in {town}, is {rng.randint(20, 70)} years old and owns a"
        f" {rng.choice(_THINGS)}."
        for name, town in zip(names, towns, strict=True)
    ]
    asked = rng.randrange(len(names))
    text = f"{' '.join(facts)}\n\nIn which town does {names[asked]} live? Answer with one word."
    return Question("lookup", text, towns[asked])


def _json(rng: random.Random) -> Question:
    name, town, age, has_car = (
        rng.choice(_NAMES),
        rng.choice(_TOWNS),
        rng.randint(20, 70),
        rng.random() < 0.5,
    )
    text = (
        f"{name} is {age}, lives in {town} and {'has' if has_car else 'does not have'} a car. Write"
        ' this as one JSON object with the keys "name", "town", "age" (a number) and "has_car"'
        " (true or false). Write only the JSON."
    )
    wanted = {"name": name, "town": town, "age": age, "has_car": has_car}
    return Question("JSON", text, json.dumps(wanted))


def main() -> None:
    """Print a line for each file."""
    asked = list(questions())
    prompts = [[{"role": "user", "content": one.text}] for one in asked]
    for path in sys.argv[1:]:
        right = dict.fromkeys((one.kind for one in asked), 0)
        with qsf.Model(path, sessions=_SESSIONS, max_seq_len=512) as model:
            for answer in model.batch(prompts, temperature=0, max_tokens=_ANSWER_TOKENS):
                one = asked[answer.index]
                right[one.kind] += answer.error is None and one.is_right(answer.text)
        kinds = ", ".join(f"{kind} {n}" for kind, n in right.items())
        print(f"{path}: {sum(right.values())} of {len(asked)} ({kinds})", flush=True)


if __name__ == "__main__":
    main()
