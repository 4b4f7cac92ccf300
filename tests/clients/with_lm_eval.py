"""lm-eval's perplexity of a text, by a task of its own; the tokenizer is the server's."""
# SPDX-License-Identifier: Apache-2.0

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: story
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/story.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""

with tempfile.TemporaryDirectory() as folder:
    text = "Once upon a time there was a girl who had a cat."
    Path(folder, "story.jsonl").write_text(json.dumps({"text": text}) + "\n", "utf-8")
    Path(folder, "story.yaml").write_text(TASK.replace("FOLDER", folder), "utf-8")
    tasks = TaskManager(include_path=folder, include_defaults=False)
    results = lm_eval.simple_evaluate(
        "local-completions",
        model_args={
            "model": "any",
            "base_url": f"{sys.argv[1]}/v1/completions",
            "max_length": 256,
            "tokenizer_backend": "remote",
        },
        tasks=["story"],
        task_manager=tasks,
    )
assert 0 < results["results"]["story"]["bits_per_byte,none"] < 8
print("[]")
