# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/*.npz: what HuggingFace transformers computes for the bundled models.

Run from the project root with the optional extra `golden` installed:

    python tools/make_golden.py

The arithmetic is fp32 on the stored fp16 weights, eager attention, CPU. Each file holds

    text, tokens [256]           a text and its ids, the first being the begin-of-text token
    logit_bytes u8 [4, 256*2048] for every position, in units of 2^-16, as an int32 whose
                                 four bytes lie in planes so that they compress
    prompts [10], prompt_ids     the prompts and their ids, rows padded with -1
    continuations [10, 32]       the greedy continuations, -1 after an end-of-text token
    versions                     of torch and transformers

tests/python/make/golden.py reads them. The rounding is at most 7.7e-6; transformers itself is
2.8e-5 from the same sums in f64.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "tiny-llama": ROOT / "examples" / "tiny-llama",
    "tiny-gpt2": ROOT / "tests" / "models" / "tiny-gpt2",
}
N_TOKENS = 256
N_NEW_TOKENS = 32
LOGIT_UNITS = 65536

TEXT = """\
Once upon a time there was a baker who lived at the end of a long street. Every morning, before \
the sun was up, she lit the oven and put on her white apron. The smell of warm bread went down the \
street, past the school and the small shop, and woke the children in their beds.

One day a boy named Tom came to the door. "I have no money," he said, "but I can carry the wood." \
The baker smiled. "Then carry the wood, and you shall have a bun." So Tom carried the wood every \
morning, and soon he learned how to mix the flour with water and salt, and how long to wait.

In the winter the river froze and nobody could bring flour to the town. People were sad. Tom took \
his sled and walked over the hills to the old mill. It was cold and the snow was deep, but he came \
back before dark with two big bags. The baker gave him a hug, and they worked all night. In the \
morning there was bread for everyone, and the whole street sang. "Thank you, Tom," said the baker. \
"Now this is your house too." They were very happy, and the oven was never cold again. When spring \
came, the river began to run, and boats went up and down with apples, wool and letters from \
far away.
"""

PROMPTS = (
    "Once upon a time",
    "The little dog ran to the",
    "Lily and Ben went to the park. They saw",
    '"Can I have some cake?" asked',
    "It was raining, so Tom",
    "The history of the city",
    "In the morning the sun",
    "She opened the box and found",
    "The cat was very hungry. It",
    "My dear friend, I am writing to",
)


def main() -> int:
    """Write the golden file of every bundled model; return the exit code."""
    torch.set_grad_enabled(False)
    (ROOT / "tests" / "golden").mkdir(parents=True, exist_ok=True)
    for name, folder in MODELS.items():
        path = ROOT / "tests" / "golden" / f"{name}.npz"
        write_golden(folder, path)
        sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes\n")
    return 0


def write_golden(folder: Path, path: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    load_tokenizer: Any = transformers.PreTrainedTokenizerFast
    tokenizer = load_tokenizer(tokenizer_file=str(folder / "tokenizer.json"))
    bos_id, eos_id = model.config.bos_token_id, model.config.eos_token_id

    def encode(text: str) -> list[int]:
        return [bos_id, *tokenizer.encode(text, add_special_tokens=False)]

    tokens = encode(TEXT)
    if len(tokens) < N_TOKENS:
        message = f"the text has {len(tokens)} tokens, {N_TOKENS} are wanted"
        raise ValueError(message)
    tokens = tokens[:N_TOKENS]
    logits = model(torch.tensor([tokens])).logits[0].numpy()

    prompt_rows = [encode(prompt) for prompt in PROMPTS]
    prompt_ids = np.full((len(PROMPTS), max(map(len, prompt_rows))), -1, np.int32)
    continuations = np.full((len(PROMPTS), N_NEW_TOKENS), -1, np.int32)
    for row, prompt in enumerate(prompt_rows):
        prompt_ids[row, : len(prompt)] = prompt
        new = greedy(model, prompt, eos_id)
        continuations[row, : len(new)] = new
    np.savez_compressed(
        path,
        text=np.array(TEXT),
        tokens=np.array(tokens, np.int32),
        logit_bytes=byte_planes(logits),
        prompts=np.array(PROMPTS),
        prompt_ids=prompt_ids,
        continuations=continuations,
        versions=np.array([f"{lib.__name__} {lib.__version__}" for lib in (torch, transformers)]),
    )


def byte_planes(logits: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round [n_tokens, n_vocab] to multiples of 2^-16 and split the integers into bytes."""
    units = np.rint(logits.astype(np.float64) * LOGIT_UNITS).astype("<i4")
    return np.ascontiguousarray(units.view(np.uint8).reshape(-1, 4).T)


def greedy(model: Any, prompt: list[int], eos_id: int) -> list[int]:
    """The greedy continuation, evaluated without a cache for every token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + N_NEW_TOKENS:
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == eos_id:
            break
    return tokens[len(prompt) :]


if __name__ == "__main__":
    sys.exit(main())
