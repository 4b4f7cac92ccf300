# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/families.npz: what transformers computes for a small model of every family.

Run from the project root with the optional extra `golden` installed:

    python tools/make_golden_families.py [part of a case's name]

Each case is a configuration in tests/data/golden_families.json: the class of transformers, what it
is `like` in `bases`, and what differs; `published` has the keys that transformers saves under other
names than published checkpoints have. transformers makes the model and saves it, which says what
its tensors are called on disk; all of them are overwritten (tests/python/make/golden_families.py
says with what), loaded again, and evaluated in f32, eager attention, CPU.
With a part of a name only those cases are made anew; the others are kept.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make import golden_families as made  # noqa: E402

DATA = ROOT / "tests" / "data" / "golden_families.json"
# Tensors that transformers saves under other names than published checkpoints have.
RENAMED = {
    "kimi_k25": (r"(language_model\.model)\.blocks\.", r"\1.layers."),
    "kimi_linear": (r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1"),
    "olmo_hybrid": (r"(layers\.3\.)feedforward_layer_norm", r"\1post_attention_layernorm"),
}
# Between the last score that is chosen and the next one, as a part of it where it is below 1.
LEAST_MARGIN = 1e-4


def read_cases() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the whole configurations, and what published ones say otherwise."""
    data = json.loads(DATA.read_text("utf-8"))

    def whole(said: Any) -> Any:
        if not isinstance(said, dict):
            return said
        like = [whole(data["bases"][name]) for name in said.get("like", ())]
        own = {key: whole(value) for key, value in said.items() if key != "like"}
        return {key: value for part in (*like, own) for key, value in part.items()}

    return {name: whole(case) for name, case in data["cases"].items()}, data["published"]


def main(wanted: str = "") -> int:
    """Write the golden file; return the exit code."""
    cases, published = read_cases()
    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
    arrays, table = _stored()
    for gone in table.keys() - cases.keys():
        del table[gone]
    arrays = {key: arrays[key] for key in arrays if key.split("/")[0] in table}
    for name, options in cases.items():
        if wanted in name or name not in table:
            config, shapes, logits, chosen = golden(options.pop("class"), options)
            largest = float(np.abs(logits).max())
            table[name] = [config | published.get(name, {}), shapes, largest]
            arrays[name] = made.planes_of(logits, largest)
            arrays |= {f"{name}/{part}": values for part, values in chosen.items()}
            sys.stdout.write(f"{name}: largest logit {largest:.3g}, {len(shapes)} tensors\n")
    libraries = [f"{lib.__name__} {lib.__version__}" for lib in (torch, transformers)]
    np.savez_compressed(
        made.PATH,
        cases=np.frombuffer(json.dumps(table, sort_keys=True).encode(), np.uint8),
        versions=np.array(libraries),
        **arrays,
    )
    sys.stdout.write(f"{made.PATH.name}: {made.PATH.stat().st_size} bytes\n")
    return 0


def _stored() -> tuple[dict[str, Any], dict[str, Any]]:
    if not made.PATH.exists():
        return {}, {}
    with np.load(made.PATH) as stored:
        table = json.loads(bytes(stored["cases"]))
        keys = set(stored.files) - {"cases", "versions"}
        return {name: stored[name] for name in keys}, table


def golden(
    model_type: str, options: dict[str, Any]
) -> tuple[
    dict[str, Any],
    dict[str, tuple[int, ...]],
    np.ndarray[Any, Any],
    dict[str, np.ndarray[Any, Any]],
]:
    """Return config.json, the shapes of the tensors on disk, and what is computed of the text.

    That are the logits and, of a mixture, the ``experts`` [routed layers, tokens, chosen] in
    ascending order and their ``weights``.
    """
    config = transformers.AutoConfig.for_model(model_type, **options)
    loader: Any = transformers.AutoModelForCausalLM
    is_encoder = model_type in made.ENCODERS or "use_bidirectional_attention" in options
    is_drafter = "backbone_hidden_size" in options
    if "num_labels" in options:
        loader = transformers.AutoModelForSequenceClassification
    elif is_encoder:
        loader = transformers.AutoModel
    elif "text_config" in options and not is_drafter:
        loader = transformers.AutoModelForImageTextToText
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loader.from_config(config).save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text("utf-8"))
        shapes = published_names(saved, _shapes(folder / "model.safetensors"))
        case = made.Case("", saved, shapes, [], np.empty(0, np.float32))
        case.write(folder)
        model, report = loader.from_pretrained(
            folder,
            dtype=torch.float32,
            # Its eager attention adds the slopes twice, in the mask and to the scores.
            attn_implementation="sdpa" if options.get("alibi") else "eager",
            output_loading_info=True,
        )
        faults = {kind: values for kind, values in report.items() if values}
        if faults:
            raise ValueError(f"{model_type}: {faults}")
        model.eval()
        text = options.get("text_config", options)
        n_vocab = text.get("unpadded_vocab_size", text["vocab_size"])
        tokens = made.tokens_of(n_vocab)
        if "num_labels" in options:
            return saved, shapes, *_of_pairs(model, tokens)
        if is_drafter:
            return saved, shapes, *_of_drafter(model, tokens)
        with _Chosen(model) as chosen:
            out = model(torch.tensor([tokens]))
            logits = (out.last_hidden_state if is_encoder else out.logits)[0].double().numpy()
    return saved, shapes, logits, chosen.arrays()


def published_names(config: dict[str, Any], shapes: dict[str, Any]) -> dict[str, Any]:
    """The shapes by the names of published checkpoints, convolutions cut between q, k and v."""
    old, new = RENAMED.get(config["model_type"], ("$^", ""))
    shapes = {re.sub(old, new, name): shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if "_conv1d." in name:
            rows = shapes[name.replace("_conv1d.", "_proj.")]
            shapes[name] = [rows[0], *shape[1:]]
    return shapes


def _of_pairs(
    model: Any, tokens: list[int]
) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return the hidden states of the text, and the logits of pairs."""
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    scores = []
    for pair in made.pairs_of(2 if "roberta" in model.config.model_type else 1):
        types = [int(3 in pair[:i]) for i in range(len(pair))]
        more = {"token_type_ids": torch.tensor([types])} if has_types else {}
        scores.append(model(torch.tensor([pair]), **more).logits[0, 0].item())
    hidden = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
    return hidden.double().numpy(), {"scores": np.array(scores, np.float32)}


def _of_drafter(
    drafter: Any, tokens: list[int]
) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return the logits of the last guesses, and the guesses after each token but the first.

    The model that is guessed for is that of the case ``made.DRAFTED``.
    """
    options = read_cases()[0][made.DRAFTED]
    config = transformers.AutoConfig.for_model(options.pop("class"), **options)
    with tempfile.TemporaryDirectory() as name:
        folder, loader = Path(name), transformers.AutoModelForCausalLM
        loader.from_config(config).save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text("utf-8"))
        shapes = _shapes(folder / "model.safetensors")
        made.Case("", saved, shapes, [], np.empty(0, np.float32)).write(folder)
        model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    guesses: list[int] = []
    logits: list[np.ndarray[Any, Any]] = []
    for n in range(1, len(tokens)):  # those that are evaluated
        seen = model.eval()(
            torch.tensor([tokens[:n]]), output_hidden_states=True, return_shared_kv_states=True
        )
        hidden, token = seen.hidden_states[-1][:, -1:], tokens[n]
        logits = []
        for _ in range(made.N_GUESSES):
            embedding = model.get_input_embeddings()(torch.tensor([[token]]))
            out = drafter(
                inputs_embeds=torch.cat([embedding, hidden], -1),
                position_ids=torch.tensor([[n]]),
                shared_kv_states=dict(seen.shared_kv_states),
            )
            best, next_ = out.logits[0, 0].topk(2)[0].tolist()
            if best - next_ < LEAST_MARGIN:
                raise ValueError(f"a guess is as near as {best - next_:.2g}")
            hidden, token = out.last_hidden_state, int(out.logits.argmax())
            logits.append(out.logits[0, 0].double().numpy())
            guesses.append(token)
    by_token = np.array(guesses, np.uint8).reshape(-1, made.N_GUESSES)
    return np.stack(logits), {"guesses": by_token}


class _Chosen:
    """Notes what the experts of every layer are given, and how near the choices were."""

    def __init__(self, model: Any) -> None:
        self._layers: list[tuple[Any, Any]] = []
        self._margin = float("inf")
        self._topk = torch.topk, torch.Tensor.topk
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def __enter__(self) -> _Chosen:
        """Look at every torch.topk; those within groups are no choices, but no nearer either."""

        def topk(values: Any, k: int, *args: Any, **options: Any) -> Any:
            if k < values.shape[-1]:
                best = self._topk[0](values, k + 1, dim=-1)[0]
                last, next_ = best[..., -2], best[..., -1]
                gaps = (last - next_) / last.abs().clamp(max=1.0)
                self._margin = min(self._margin, float(gaps.min()))
            return self._topk[0](values, k, *args, **options)

        torch.topk = torch.Tensor.topk = topk
        return self

    def __exit__(self, *_error: object) -> None:
        torch.topk, torch.Tensor.topk = self._topk
        if self._margin < LEAST_MARGIN:
            raise ValueError(f"a choice of experts is as near as {self._margin:.2g}")

    def _note(self, _module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        experts, weights = [*args, *options.values()][1:3]
        order = experts.argsort(dim=1)
        self._layers.append((experts.gather(1, order), weights.gather(1, order)))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        if not self._layers:
            return {}
        experts, weights = (torch.stack(of).numpy() for of in zip(*self._layers, strict=True))
        return {"experts": experts.astype(np.uint8), "weights": weights.astype(np.float32)}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
