"""The SDK of OpenAI over /v1/responses."""

import json
import sys

from openai import OpenAI

client, query = OpenAI(), json.loads(sys.stdin.readline())["query"]
items = [{"role": "user", "content": query}]
for number in range(3):
    reply = client.responses.create(model="tiny", input=items)
    items += [{"role": "assistant", "content": reply.output_text}, {"role": "user", "content": f"again {number}"}]
print(reply.output_text)
