# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/adapters.npz: adapters as PEFT saves them, and what PEFT computes with them.

Run from the project root with the optional extra `golden` and peft installed:

    python tools/make_golden_adapters.py

For each adapter the file holds the files of its folder as bytes, `name/adapter_config.json` and
`name/adapter_model.safetensors`, and for each case of CASES (a base, and adapters with their
scales) `logits/case`, of TOKENS, every column or every 16th of a large vocabulary. The numbers of
an adapter are random: A, B and the magnitudes change the logits by about as much as they are large.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make import golden_adapters as made  # noqa: E402

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONV = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": EVERY}),
    "patterns": (
        "llama",
        {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": EVERY,
            "use_rslora": True,
            "rank_pattern": {"down_proj": 5, r"^model\.layers\.0\.self_attn\.(q|k)_proj": 3},
            "alpha_pattern": {"layers.1.mlp.up_proj": 7, "proj": 2, "v_proj": 11},
        },
    ),
    "one-layer": (
        "llama",
        {"r": 3, "lora_alpha": 6, "target_modules": ["v_proj"], "layers_to_transform": [1]},
    ),
    "biased": ("qwen2", {"r": 2, "lora_alpha": 4, "target_modules": EVERY[:4]}),
    "dora": ("qwen2", {"r": 2, "lora_alpha": 4, "target_modules": EVERY, "use_dora": True}),
    "conv": ("gpt2", {"r": 2, "lora_alpha": 4, "layers_to_transform": [1], **CONV}),
    "conv-dora": (
        "gpt2",
        {"r": 2, "lora_alpha": 4, "layers_to_transform": [2], "use_dora": True, **CONV},
    ),
}


def with_numbers(model: Any, seed: int) -> None:
    """Give the adapter's tensors random numbers."""
    random = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        if "lora_magnitude_vector" in name:
            tensor.mul_(1 + 0.2 * torch.randn(tensor.shape, generator=random))
        elif "lora_" in name:
            spread = 0.3 if "lora_A" in name else 0.1
            numbers = spread * torch.randn(tensor.shape, generator=random)
            tensor.copy_(numbers.half())  # which a file beside the weights keeps exactly


def main() -> int:
    """Write the golden file; return the exit code."""
    torch.set_grad_enabled(False)
    arrays: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bases = {base: made.base(base, folder / base) for base in ("llama", "qwen2", "gpt2")}

        def model_of(base: str) -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(
                bases[base], dtype=torch.float32, attn_implementation="eager"
            ).eval()

        for seed, (name, (base, options)) in enumerate(ADAPTERS.items()):
            config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
            model = peft.get_peft_model(model_of(base), config)
            with_numbers(model, seed)
            model.save_pretrained(folder / name)
            for file in made.FILES:
                arrays[f"{name}/{file}"] = np.frombuffer((folder / name / file).read_bytes(), "u1")
        for case, (base, used) in made.CASES.items():
            model = model_of(base)
            before = model(torch.tensor([made.TOKENS])).logits
            for name in used:
                if not isinstance(model, peft.PeftModel):
                    model = peft.PeftModel.from_pretrained(model, folder / name, name)
                else:
                    model.load_adapter(folder / name, name)
            model.base_model.set_adapter(list(used))
            for module in model.modules():
                for name, scale in used.items():
                    if isinstance(module, peft.tuners.lora.LoraLayer) and name in module.scaling:
                        module.set_scale(name, scale)
            logits = model(torch.tensor([made.TOKENS])).logits
            arrays[f"logits/{case}"] = made.columns(logits[0].numpy())
            change = ((logits - before).abs().max() / before.abs().max()).item()
            sys.stdout.write(f"{case}: changes the logits by {change:.2g} of the largest\n")
    libraries = [f"{lib.__name__} {lib.__version__}" for lib in (torch, transformers, peft)]
    np.savez_compressed(made.PATH, versions=np.array(libraries), **arrays)
    sys.stdout.write(f"{made.PATH.name}: {made.PATH.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
