"""An agent that does nothing but ask and wait, to measure with: its tool takes WAITING_SECONDS, its answer is times.

It asks WAITING_TURNS times, in one conversation, for WAITING_TOKENS tokens each.
"""

import asyncio
import json
import os
import time
from typing import Any

import httpx

SECONDS = float(os.environ.get("WAITING_SECONDS", "0.5"))
TURNS, TOKENS = (
    int(os.environ.get(f"WAITING_{name}", default)) for name, default in (("TURNS", "3"), ("TOKENS", "32"))
)


async def waiting_agent(task: Any, base_url: str) -> str:
    """Ask, wait, and ask again; return the seconds of each answer."""
    messages, times = [{"role": "user", "content": task.query}], []
    # One client each: a pool goes through all of its connections for every request.
    async with httpx.AsyncClient(timeout=600, trust_env=False, verify=False) as connection:
        for _ in range(TURNS):
            began = time.perf_counter()
            body = {"messages": messages, "max_tokens": TOKENS}
            answer = await connection.post(f"{base_url}/chat/completions", json=body)
            message = answer.json()["choices"][0]["message"]
            times.append(time.perf_counter() - began)
            await asyncio.sleep(SECONDS)
            messages += [message, {"role": "user", "content": "the tool says: go on"}]
    return json.dumps(times)
