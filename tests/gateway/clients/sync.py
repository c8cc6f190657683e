"""The SDK of OpenAI, without a coroutine."""

import json
import sys

from openai import OpenAI

client, query = OpenAI(), json.loads(sys.stdin.readline())["query"]
messages = [{"role": "user", "content": query}]
for number in range(3):
    reply = client.chat.completions.create(model="tiny", messages=messages).choices[0].message
    messages += [reply.to_dict(), {"role": "user", "content": f"again {number}"}]
print(reply.content)
