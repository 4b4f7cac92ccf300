"""The texts that langchain gets by OpenAI's API and by ollama's."""
# SPDX-License-Identifier: Apache-2.0

import json
import sys

from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

url, prompt = sys.argv[1], "Tell me a story"
own = {"model": "any", "base_url": f"{url}/v1", "api_key": "none"}
texts = []
for ai in (
    ChatOpenAI(**own, max_tokens=20, temperature=0),
    ChatOllama(model="any", base_url=url, num_predict=20, temperature=0),
):
    texts += [ai.invoke(prompt).content, "".join(piece.content for piece in ai.stream(prompt))]
for vectors in (
    OpenAIEmbeddings(**own, check_embedding_ctx_length=False),
    OllamaEmbeddings(model="any", base_url=url),
):
    assert len(vectors.embed_documents(["a", "b"])) == 2
print(json.dumps(texts))
