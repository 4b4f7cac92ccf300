"""Times and counts of an answer: OpenAI's ``usage``, llama-server's ``timings``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsf.serve.api.answering import Choice


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Return the numbers of tokens; a prompt counts once for its ``n`` choices."""
    firsts = [choice.job for choice in choices[::n]]
    n_prompt = sum(job.n_prompt for job in firsts)
    n_answer = sum(choice.job.n_generated for choice in choices)
    n_thought = sum(choice.job.n_thought for choice in choices)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": sum(job.n_cached for job in firsts)},
        "completion_tokens_details": {"reasoning_tokens": n_thought},
    }


def timings(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the times of the first choice, with llama-server's names, and its seed."""
    job = choices[0].job
    n_new = job.n_prompt - job.n_cached
    n_steps = max(job.n_generated - 1, 0)
    prompt_ms = 1e3 * max(job.first - job.admitted, 0.0)
    answer_ms = 1e3 * max(job.last - job.first, 0.0)
    return {
        "cache_n": job.n_cached,
        "prompt_n": n_new,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": round(1e3 * n_new / prompt_ms, 3) if prompt_ms else 0.0,
        "predicted_n": job.n_generated,
        "forced_n": job.n_forced,
        "predicted_ms": round(answer_ms, 3),
        "predicted_per_second": round(1e3 * n_steps / answer_ms, 3) if answer_ms else 0.0,
        "queue_ms": round(1e3 * max(job.admitted - job.arrived, 0.0), 3),
        "seed": job.choosing.seed,
    }
