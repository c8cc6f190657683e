"""The agents of OpenAI, over chats or responses as the first argument says, with a tool at hand."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


async def main() -> None:
    set_tracing_disabled(True)
    kind = OpenAIChatCompletionsModel if sys.argv[1] == "chats" else OpenAIResponsesModel
    tools = [add] if sys.argv[2:] == ["tools"] else []
    agent = Agent(name="helper", model=kind("tiny", AsyncOpenAI()), tools=tools)
    given = [{"role": "user", "content": json.loads(sys.stdin.readline())["query"]}]
    for number in range(1 if tools else 3):
        result = await Runner.run(agent, given)
        given = [*result.to_input_list(), {"role": "user", "content": f"again {number}"}]
    print(result.final_output)


asyncio.run(main())
