"""An agent for measurements: it sends requests and waits WAITING_SECONDS for its tool; its answer is the latencies.

It makes WAITING_TURNS requests in one conversation, for WAITING_TOKENS tokens each.
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
    """Send requests with waits in between -> the seconds of each response, as JSON."""
    messages, times = [{"role": "user", "content": task.query}], []
    # One client per agent: a pool scans all of its connections for every request.
    async with httpx.AsyncClient(timeout=600, trust_env=False, verify=False) as connection:
        for _ in range(TURNS):
            start = time.perf_counter()
            body = {"messages": messages, "max_tokens": TOKENS}
            answer = await connection.post(f"{base_url}/chat/completions", json=body)
            message = answer.json()["choices"][0]["message"]
            times.append(time.perf_counter() - start)
            await asyncio.sleep(SECONDS)
            messages += [message, {"role": "user", "content": "the tool says: go on"}]
    return json.dumps(times)
