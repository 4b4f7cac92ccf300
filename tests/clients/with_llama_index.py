"""The texts that llama-index gets by OpenAI's API and by ollama's."""
# SPDX-License-Identifier: Apache-2.0

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

url = sys.argv[1]
messages = [ChatMessage(role="user", content="Tell me a story")]
own = {"api_base": f"{url}/v1", "api_key": "none", "is_chat_model": True}
texts = []
for ai in (
    OpenAILike(model="any", max_tokens=20, temperature=0, **own),
    Ollama(model="any", base_url=url, temperature=0, additional_kwargs={"num_predict": 20}),
):
    pieces = [part.delta or "" for part in ai.stream_chat(messages)]
    texts += [ai.chat(messages).message.content, "".join(pieces)]
print(json.dumps(texts))
