"""An agent written with the SDK of OpenAI, which knows nothing of training: three tools, and words to call them.

    python -m experiments.train_agent --agent=flowgrpo.recipes.example_agent:agent       the function, for many tasks
    OPENAI_BASE_URL=... python -m flowgrpo.recipes.example_agent --query="Add 31 to 58."  the program, for one

The model writes "Tool: calculator" and "Context: 31 + 58" and is told the result, until it writes "Tool: answer".
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
    """One for all tasks: to make one takes longer than a request."""
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise BadInput("the example agent needs the SDK of OpenAI: pip install openai") from None
    return AsyncOpenAI(api_key=os.environ.get("OPENAI_API_KEY", "none"), base_url=os.environ.get("OPENAI_BASE_URL"))


@cache
def own_tools() -> Toolset:
    """A calculator, Python in a sandbox, and a search through the corpus of the offline tasks."""
    documents = [Document(p["title"], p["text"], "corpus", n, False) for n, p in enumerate(passages(), 1)]
    own = [
        calculator(),
        python(Sandbox(workers=1), limits=Limits(seconds=SECONDS), pure=True),
        search(Corpus(tuple(documents)), top=1),
    ]
    return toolset(own, seconds=SECONDS)


def read(words: str) -> tuple[str, str]:
    """The tool and the context of an action; "" for what is not written."""
    fields: dict[str, str] = {"Tool": "", "Context": ""}
    name = ""
    for line in words.splitlines():
        begins = next((one for one in fields if line.startswith(f"{one}:")), None)
        name = begins or name
        if name:
            fields[name] += (line[len(name) + 1 :] if begins else f"\n{line}").strip(" ")
    return fields["Tool"].strip(), fields["Context"]


def use(name: str, context: str) -> str:
    """Call a tool; return what it says, or why it says nothing."""
    schema = next((schema for schema in own_tools().schemas if schema["name"] == name), None)
    if schema is None:
        return f"Error: there is no tool {name!r}"
    argument = next(iter(schema["parameters"]["properties"]))
    result = own_tools().do(Call("tool", name, {argument: context}))
    return f"Error: {result.text}" if result.error or result.failure else f"Result: {result.text}"


async def agent(task: Any, base_url: str | None = None) -> str:
    """The answer to a task's query."""
    own = client().with_options(base_url=base_url) if base_url else client()
    from openai import BadRequestError

    names = ", ".join([*(schema["name"] for schema in own_tools().schemas), "answer"])
    messages: list[Any] = [{"role": "user", "content": f"{task.query}\nTools: {names}"}]
    while True:
        try:
            reply = await own.chat.completions.create(model=MODEL, messages=messages)
        except BadRequestError:  # no request is left
            return ""
        words = reply.choices[0].message.content or ""
        name, context = read(words)
        if name == "answer":
            return context
        seen = await asyncio.to_thread(use, name, context)
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": seen}]


if __name__ == "__main__":
    from types import SimpleNamespace

    query = next((word.removeprefix("--query=") for word in sys.argv[1:] if word.startswith("--query=")), "")
    print(asyncio.run(agent(SimpleNamespace(query=query or sys.stdin.readline().strip()))))
