"""The SDK of OpenAI, whose answers come in pieces."""

import asyncio
import json
import sys

from openai import AsyncOpenAI


async def main() -> None:
    client, query = AsyncOpenAI(), json.loads(sys.stdin.readline())["query"]
    messages = [{"role": "user", "content": query}]
    for number in range(3):
        words = ""
        async for chunk in await client.chat.completions.create(model="tiny", messages=messages, stream=True):
            words += chunk.choices[0].delta.content or ""
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": f"again {number}"}]
    print(words)


asyncio.run(main())
