"""The texts that litellm gets by OpenAI's API and by ollama's."""
# SPDX-License-Identifier: Apache-2.0

import json
import sys

import litellm

url = sys.argv[1]
asked = {"messages": [{"role": "user", "content": "Tell me a story"}], "temperature": 0}
own = {"model": "openai/any", "api_base": f"{url}/v1", "api_key": "none"}
asked |= {"max_tokens": 20}
whole = litellm.completion(**own, **asked)
stream = litellm.completion(**own, **asked, stream=True)
pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
ollama = litellm.completion(model="ollama_chat/any", api_base=url, **asked)
assert len(litellm.embedding(**own, input=["a", "b"]).data) == 2
print(json.dumps([r.choices[0].message.content for r in (whole, ollama)] + ["".join(pieces)]))
