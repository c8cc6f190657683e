"""An agent that does nothing but ask and wait, to measure with: its tool takes WAITING_SECONDS, its answer is times.

It asks WAITING_TURNS times, in one conversation, for WAITING_TOKENS tokens each.
"""

import asyncio
import json
import os
import time
from functools import cache
from typing import Any

import httpx

SECONDS = float(os.environ.get("WAITING_SECONDS", "0.5"))
TURNS, TOKENS = (
    int(os.environ.get(f"WAITING_{name}", default)) for name, default in (("TURNS", "3"), ("TOKENS", "32"))
)


@cache
def connections() -> httpx.AsyncClient:
    """Make the client of all sessions, with as many connections as there are."""
    return httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None), trust_env=False)


async def waiting_agent(task: Any, base_url: str) -> str:
    """Ask, wait, and ask again; return the seconds of each answer."""
    messages, times = [{"role": "user", "content": task.query}], []
    for _ in range(TURNS):
        began = time.perf_counter()
        body = {"messages": messages, "max_tokens": TOKENS}
        answer = await connections().post(f"{base_url}/chat/completions", json=body)
        message = answer.json()["choices"][0]["message"]
        times.append(time.perf_counter() - began)
        await asyncio.sleep(SECONDS)
        messages += [message, {"role": "user", "content": "the tool says: go on"}]
    return json.dumps(times)
