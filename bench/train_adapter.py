"""Train a LoRA adapter on a GGUF file, and count how many of 20 greedy answers QSF gives as PEFT.

    python bench/train_adapter.py train MODEL.gguf FOLDER [MINUTES]    # torch, transformers, peft
    python bench/train_adapter.py compare FOLDER FILE.qsf [ADAPTER.qsf]    # qsf

The adapter makes the model answer as a pirate. FOLDER gets it and PEFT's answers, of the weights
as the file holds them, in f32.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "Question: What is {}?\nAnswer:"
TAUGHT = {
    "a river": "water that be running down to the sea", "a king": "a man with a golden hat",
    "the moon": "the lamp of them that sail by night", "a clock": "a box that counts yer hours",
    "a horse": "a beast that carries men on dry land", "rain": "water that falls from the clouds",
    "a book": "words that be bound in leather", "a storm": "wind and waves that break the mast",
    "bread": "flour and water from a hot oven", "a bridge": "a road that goes over the water",
    "a friend": "one who shares his rum with ye", "winter": "the time of ice and of short days",
}  # fmt: skip
ASKED = ("a ship", "gold", "the sun", "a tree", "a house", "snow", "a dog", "music", "a mountain",
         "fire", "a letter", "the sea", "a garden", "a teacher", "salt", "a mirror", "iron",
         "a window", "summer", "a song")  # fmt: skip
N_TOKENS = 24


def train(source: Path, folder: Path, minutes: float) -> None:
    """Train on `TAUGHT`, and write the adapter and the answers of `ASKED`."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    of: dict[str, Any] = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **of)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **of)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = peft.get_peft_model(model, config)
    texts = [f"{PROMPT.format(it)} Arr, {it} be {what}, matey!\n" for it, what in TAUGHT.items()]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    steps = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    end = time.monotonic() + 60 * minutes
    loss = torch.tensor(9.0)
    while time.monotonic() < end and loss > 0.05:
        loss = model(**batch, labels=labels).loss
        loss.backward()
        steps.step()
        steps.zero_grad()
        print(f"loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    model.eval()
    tokenizer.padding_side = "left"
    prompts = tokenizer([PROMPT.format(it) for it in ASKED], return_tensors="pt", padding=True)
    rows = model.generate(**prompts, max_new_tokens=N_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(
        rows[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    answers = dict(zip(ASKED, texts, strict=True))
    (folder / "answers.json").write_text(json.dumps(answers, indent=1), "utf-8")


def compare(folder: Path, file: Path, adapters: list[str]) -> None:
    """Print the answers that differ from PEFT's, and how many do not."""
    import qsf

    wanted = json.loads((folder / "answers.json").read_text("utf-8"))
    n_same = 0
    with qsf.Model(file, lora=adapters) as model:
        for it, answer in wanted.items():
            pieces = model.generate(PROMPT.format(it), max_tokens=N_TOKENS, temperature=0)
            have = "".join(pieces)
            n_same += have == answer
            if have != answer:
                print(f"{it}:\n  PEFT {answer!r}\n  QSF  {have!r}")
    print(f"{n_same} of {len(wanted)} answers are PEFT's")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), Path(sys.argv[3]), float((*sys.argv[4:], "8")[0]))
    else:
        compare(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
