"""Helpers for tests of the gateway: a small model whose template has tools, external agents, and an httpx client."""

import asyncio
import json
import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import httpx
import jax

import flowgrpo as fg
from flowgrpo.data.tokenizer import load_tokenizer
from flowgrpo.gateway import agent_env
from flowgrpo.models.hf import load_model
from flowgrpo.recipes.offline_start import write_model

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS, MAX_TOKENS, CONTEXT = 5, 12, 256
WORDS = ["what is two plus two", "system user assistant tool Tools", "say it again, and then another one"]


@cache
def tiny_folder() -> Path:
    """A model folder with a chat template that shows tools."""
    folder = Path(mkdtemp(prefix="gateway-")) / "model"
    write_model(folder, WORDS, seed=0, shape=SHAPE, vocab_size=320)
    text = load_tokenizer(folder, template=TEMPLATE)
    text.save(folder)
    return folder


@cache
def tiny_model() -> fg.models.Model:
    return load_model(tiny_folder())


def make_engine(slots: int = 8, **settings) -> fg.Engine:
    model = tiny_model()
    sizes = {"slots": slots, "slot_length": CONTEXT, "chunk": 16, "steps": 4}
    return fg.Engine(
        model.policy,
        model.params,
        fg.generate.EngineSettings(banned=model.banned, **{**sizes, **settings}),
        detokenize=model.tokenizer.decode,
    )


def make_env(**settings) -> fg.HostEnv:
    sizes = {"turns": TURNS, "max_tokens": MAX_TOKENS, "context_tokens": CONTEXT}
    return agent_env(tiny_model().tokenizer, **{**sizes, **settings})


def tasks_of(count: int) -> list[fg.Task]:
    return [
        fg.Task(f"task-{i}", f"what is {i} plus two", (str(i + 2),), "answer", {"secret": "gold"}) for i in range(count)
    ]


def keys_of(count: int) -> jax.Array:
    return jax.random.split(jax.random.key(7), count)


def post(url: str, body, **more):
    """Post a request -> (status, JSON of the response)."""
    data = body if isinstance(body, bytes | str) else json.dumps(body)
    response = httpx.post(url, content=data, timeout=60, **more)
    return response.status_code, response.json()


async def ask(client: httpx.AsyncClient, url: str, messages, **more) -> dict:
    """The first choice of a chat completion."""
    response = await client.post(f"{url}/chat/completions", json={"messages": messages, **more}, timeout=60)
    response.raise_for_status()
    return response.json()["choices"][0]


async def talkative(task: fg.Task, url: str) -> str:
    """Sends three requests in one conversation; its answer is the last response."""
    messages = [{"role": "user", "content": task.query}]
    async with httpx.AsyncClient() as client:
        for number in range(3):
            choice = await ask(client, url, messages)
            messages += [choice["message"], {"role": "user", "content": f"again {number}"}]
    return choice["message"]["content"]


async def slow(task: fg.Task, url: str) -> str:
    """Sends one request, then creates the file of the environment variable ANSWERED, and sleeps."""
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
    Path(os.environ["ANSWERED"]).touch()
    await asyncio.sleep(60)
    return "never"
