# SPDX-License-Identifier: Apache-2.0
"""`qsf serve --lora NAME=FILE`: each request is answered with the adapter that it names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from make.golden_adapters import Q, pair, write_adapter
from make.served import Client, serving
from qsf import Model
from qsf_converter import convert_adapter

NAMES = ("usual", "poet", "pirate")
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def lora(tiny_llama_8bit: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    with Model(tiny_llama_8bit, ram_budget=None) as model:
        dim = model.info.dim
    for rank, name in enumerate(NAMES[1:], 2):
        tensors = pair(Q, n_out=dim, n_in=dim, rank=rank)
        adapter = write_adapter(folder / name, tensors, r=rank)
        convert_adapter(str(adapter), tiny_llama_8bit, folder / f"{name}.qsf")
    return [f"{name}={folder / name}.qsf:0.2" for name in NAMES[1:]]


@pytest.fixture(scope="module")
def alone(tiny_llama_8bit: Path, lora: list[str]) -> dict[str, str]:
    texts = {}
    for name in NAMES:
        used = [text.partition("=")[2] for text in lora if text.startswith(f"{name}=")]
        with Model(tiny_llama_8bit, lora=used, ram_budget=None) as model:
            texts[name] = "".join(model.generate(PROMPT, max_tokens=24, temperature=0))
    assert len({*texts.values()}) == 3
    return texts


@pytest.fixture
def client(tiny_llama_8bit: Path, lora: list[str], tmp_path: Path) -> Iterator[Client]:
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("Once upon a time")
    with (
        Model(tiny_llama_8bit, lora=lora, ram_budget=None, sessions=4) as model,
        serving(tiny_llama_8bit, model, {"usual": tiny_llama_8bit}, prefix=str(prefix)) as opened,
    ):
        yield opened


def text_of(client: Client, **fields: Any) -> str:
    answer = client.post(
        "/v1/completions", prompt=PROMPT, max_tokens=24, temperature=0, **fields
    ).json
    assert answer["model"] == fields.get("model", "usual")
    return str(answer["choices"][0]["text"])


def test_requests_at_the_same_time_are_answered_as_if_alone(
    client: Client, alone: dict[str, str]
) -> None:
    texts: list[tuple[str, str]] = []

    def ask(name: str) -> None:
        texts.append((name, text_of(client, model=name)))

    for _ in range(2):  # the second time from what slots hold
        threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(texts) == 12
    for name, text in texts:
        assert text == alone[name]


def test_a_request_sets_scales_as_of_llama_server(client: Client, alone: dict[str, str]) -> None:
    listed = client.get("/lora-adapters").json
    assert listed == [
        {"id": 0, "path": "poet.qsf", "name": "poet", "scale": 0.0},
        {"id": 1, "path": "pirate.qsf", "name": "pirate", "scale": 0.0},
    ], "of requests that choose none"
    assert text_of(client, lora=[{"id": 1, "scale": 0.2}]) == alone["pirate"]
    assert text_of(client, model="poet", lora=[]) == alone["usual"]
    both = text_of(client, lora=[{"id": 0, "scale": 0.2}, {"id": 1, "scale": 0.2}])
    assert both not in alone.values()
    # Nobody's salt is that of an adapter.
    assert text_of(client, cache_salt="adapters (0.0, 0.2)") == alone["usual"]
    for wrong in ([{"id": 2, "scale": 1}], [{"id": 0}], [{"id": 0, "scale": 1e9}], {"id": 0}):
        answer = client.post("/v1/completions", prompt=PROMPT, lora=wrong)
        assert (answer.status, answer.json["error"]["param"][:4]) == (400, "lora")
    assert client.post("/v1/completions", prompt=PROMPT, model="sailor").status == 404


def test_models_that_adapters_make_are_listed(client: Client) -> None:
    entries = {entry["id"]: entry for entry in client.get("/v1/models").json["data"]}
    assert {*entries} == {*NAMES}
    assert entries["poet"]["parent"] == "usual"
    assert client.get("/v1/models/poet").json["id"] == "poet"


def test_a_batch_is_answered_with_the_session_s_adapter(
    tiny_llama_8bit: Path, lora: list[str], alone: dict[str, str]
) -> None:
    with Model(tiny_llama_8bit, lora=lora, ram_budget=None, sessions=2) as model:
        model.session.adapter = "pirate"
        answers = model.batch([PROMPT] * 3, max_tokens=24, temperature=0)
        assert [answer.text for answer in answers] == [alone["pirate"]] * 3
        assert model.session.adapter == "pirate"


# ---- added, removed and set while it runs ----


@pytest.fixture
def changing(tiny_llama_8bit: Path, lora: list[str], tmp_path: Path) -> Iterator[Client]:
    """A server without adapters, whose clients may take those of a folder."""
    folder = Path(lora[0].partition("=")[2]).parent

    def load(_name: str, _budget: object, _alone: object, lora: list[str]) -> tuple[Model, str]:
        return Model(tiny_llama_8bit, lora=lora, ram_budget=None, sessions=4), ""

    with (
        load("", None, True, [])[0] as model,
        serving(
            tiny_llama_8bit, model, {"usual": tiny_llama_8bit}, load, lora_dir=str(folder)
        ) as opened,
    ):
        yield opened


def change(client: Client, how: str, **fields: str) -> int:
    return client.post(
        f"/v1/{how}_lora_adapter", {f"lora_{k}": v for k, v in fields.items()}
    ).status


def test_adapters_come_and_go_with_their_contents(changing: Client, alone: dict[str, str]) -> None:
    def ask(scale: float = 0.2) -> str:
        return text_of(changing, lora=[{"id": 0, "scale": scale}])

    def names(path: str) -> set[str]:
        listed = changing.get(path).json
        return {
            each.get("name", each.get("id")) for each in listed.get("data", listed.get("models"))
        }

    assert text_of(changing) == alone["usual"]
    for name in NAMES[1:]:  # the same name and number each time
        assert change(changing, "load", name="it", path=f"{name}.qsf") == 200
        assert [ask(), ask()] == [alone[name]] * 2
        assert changing.get("/lora-adapters").json[0]["path"] == f"{name}.qsf"
        assert names("/v1/models") == {"usual", "it"}
        assert names("/api/tags") == {"usual:latest", "it:latest"}
        text_of(changing, model="it", keep_alive=0)
        assert names("/v1/models") == {"usual", "it"}
        assert change(changing, "unload", name="it") == 200
        assert changing.post("/v1/completions", prompt=PROMPT, model="it").status == 404
    assert text_of(changing) == alone["usual"]
    assert changing.get("/lora-adapters").json == []


def test_a_request_keeps_its_adapter_until_it_ends(
    changing: Client, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert change(changing, "load", name="poet", path="poet.qsf") == 200
    assert changing.post("/lora-adapters", b'[{"id": 0, "scale": 0.2}]').json[0]["scale"] == 0.2
    assert text_of(changing) == alone["poet"]
    assert text_of(changing, lora=[]) == alone["usual"]
    begun, goes_on = threading.Event(), threading.Event()
    engine = changing.server.scheduler._engine
    evaluate = engine.evaluate

    def wait(items: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return evaluate(items)

    monkeypatch.setattr(engine, "evaluate", wait)
    said: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda: said.update(text=text_of(changing))),
        threading.Thread(
            target=lambda: said.update(status=change(changing, "unload", name="poet"))
        ),
    ]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.3)
    assert "status" not in said
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert said == {"text": alone["poet"], "status": 200}
    assert text_of(changing) == alone["usual"]
    monkeypatch.undo()
    assert changing.post("/lora-adapters", b"[]").json == []
    assert change(changing, "load", name="pirate", path="pirate.qsf") == 200
    assert text_of(changing) == alone["usual"], "after a set that was empty"


def test_what_may_not_be_loaded_is_refused_and_nothing_changes(
    changing: Client, client: Client, alone: dict[str, str], tiny_llama_8bit: Path
) -> None:
    folder = changing.server.hosts.adapter_folder
    assert folder is not None
    (folder / "out.qsf").symlink_to(tiny_llama_8bit)
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "none.qsf").write_bytes(b"none")
    (folder / "damaged.qsf").write_bytes((folder / "poet.qsf").read_bytes()[:-1] + b"?")
    before = dict(changing.server.hosts.loaded)
    for path, status in (
        ("../x", 403), ("/etc/passwd", 403), ("out.qsf", 403), ("x.qsf", 404), (".", 404),
        ("a\0b", 404), ("x" * 4000, 404), ("circle", 404),
        ("none.qsf", 400), ("damaged.qsf", 400),
    ):  # fmt: skip
        answer = changing.post("/v1/load_lora_adapter", lora_name="it", lora_path=path)
        assert (answer.status, answer.error["param"]) == (status, "lora_path")
        assert str(folder) not in answer.error["message"]
        if path != "damaged.qsf":  # which only reading the whole of it shows
            assert changing.server.hosts.loaded == before, "nobody's sequences are lost"
    for name in ("usual", "a b", "", "a=b"):
        assert change(changing, "load", name=name, path="poet.qsf") == 400
    assert change(changing, "unload", name="it") == 404
    assert changing.get("/lora-adapters").json == []
    assert text_of(changing) == alone["usual"]
    assert changing.post("/lora-adapters", b'[{"id": 0, "scale": 1}]').status == 400
    for how, fields in (("load", {"path": "poet.qsf"}), ("unload", {})):  # without --lora-dir
        assert change(client, how, name="poet", **fields) == 403
    assert client.post("/lora-adapters", b"[]").status == 403
