"""An external agent with three tools, written with OpenAI's SDK and without any code for training.

    python -m experiments.train_agent --agent=flowgrpo.recipes.example_agent:agent        trains the function
    OPENAI_BASE_URL=... python -m flowgrpo.recipes.example_agent --query="Add 31 to 58."  runs it for one query

The model writes "Tool: calculator" and "Context: 31 + 58" and gets the result, until it writes "Tool: answer".
"""

import asyncio
import os
import sys
from functools import cache
from typing import Any

from flowgrpo.contracts import Call
from flowgrpo.recipes.offline_tasks import passages
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.python import python
from flowgrpo.tools.search import Corpus, Document, search
from flowgrpo.tools.toolset import Toolset, toolset
from flowgrpo.types import BadInput

MODEL = os.environ.get("OPENAI_MODEL", "planner")
SECONDS = 10.0


@cache
def client() -> Any:
    """The client, shared by all tasks: making one takes longer than a request."""
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise BadInput("the example agent needs the SDK of OpenAI: pip install openai") from None
    return AsyncOpenAI(api_key=os.environ.get("OPENAI_API_KEY", "none"), base_url=os.environ.get("OPENAI_BASE_URL"))


@cache
def tools() -> Toolset:
    """A calculator, Python in a sandbox, and search in the corpus of the offline tasks."""
    documents = [Document(p["title"], p["text"], "corpus", n, False) for n, p in enumerate(passages(), 1)]
    parts = [
        calculator(),
        python(Sandbox(workers=1), limits=Limits(seconds=SECONDS), pure=True),
        search(Corpus(tuple(documents)), top=1),
    ]
    return toolset(parts, timeout=SECONDS)


def parse_action(text: str) -> tuple[str, str]:
    """The tool and the context of an action; "" for a missing field."""
    fields: dict[str, str] = {"Tool": "", "Context": ""}
    name = ""
    for line in text.splitlines():
        new_field = next((field for field in fields if line.startswith(f"{field}:")), None)
        name = new_field or name
        if name:
            fields[name] += (line[len(name) + 1 :] if new_field else f"\n{line}").strip(" ")
    return fields["Tool"].strip(), fields["Context"]


def call_tool(name: str, context: str) -> str:
    """Call a tool -> its result, or its error."""
    schema = next((schema for schema in tools().schemas if schema["name"] == name), None)
    if schema is None:
        return f"Error: there is no tool {name!r}"
    argument = next(iter(schema["parameters"]["properties"]))
    result = tools().call_tool(Call("tool", name, {argument: context}))
    return f"Error: {result.text}" if result.error or result.failure else f"Result: {result.text}"


async def agent(task: Any, base_url: str | None = None) -> str:
    """Answer a task's query."""
    api = client().with_options(base_url=base_url) if base_url else client()
    from openai import BadRequestError

    names = ", ".join([*(schema["name"] for schema in tools().schemas), "answer"])
    messages: list[Any] = [{"role": "user", "content": f"{task.query}\nTools: {names}"}]
    while True:
        try:
            reply = await api.chat.completions.create(model=MODEL, messages=messages)
        except BadRequestError:  # no request is left
            return ""
        text = reply.choices[0].message.content or ""
        name, context = parse_action(text)
        if name == "answer":
            return context
        observation = await asyncio.to_thread(call_tool, name, context)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]


if __name__ == "__main__":
    from types import SimpleNamespace

    query = next((flag.removeprefix("--query=") for flag in sys.argv[1:] if flag.startswith("--query=")), "")
    print(asyncio.run(agent(SimpleNamespace(query=query or sys.stdin.readline().strip()))))
