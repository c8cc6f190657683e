"""An environment of verifiers as the agent: it plays its task against the gateway, and posts its reward."""

import asyncio
import json
import os
import sys
from urllib.request import Request, urlopen

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

URL = os.environ["OPENAI_BASE_URL"]


class Talk(vf.Harness[vf.HarnessConfig]):
    """Asks three times, in this process."""

    NEEDS_CONTAINER = False

    async def setup(self, _runtime):
        """Nothing is installed."""

    async def launch(self, ctx, _trace, _runtime, endpoint, secret, _tools, data, _url=None, **_more):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for number in range(3):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = {"role": "assistant", "content": reply.choices[0].message.content}
                messages += [said, {"role": "user", "content": f"again {number}"}]
        return ProgramResult(0, "", "")


class Short(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A task that pays short answers."""

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.last_reply))


async def play() -> None:
    task = json.loads(sys.stdin.readline())
    server = vf.EvalClientConfig(base_url=URL, api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(model=os.environ["OPENAI_MODEL"], client=server, runtime=SubprocessConfig())
    agent = vf.make_agent(config)
    agent.harness = Talk(vf.HarnessConfig(id="null"))
    async with agent:
        trace = await agent.run(Short(vf.TaskData(idx=0, prompt=task["query"]), vf.TaskConfig()))
    if trace.has_error:
        sys.exit(str(trace.errors))
    print(trace.last_reply)
    body = json.dumps({"reward": trace.reward}).encode()
    urlopen(Request(f"{URL.removesuffix('/v1')}/reward", body, {"Content-Type": "application/json"}))


asyncio.run(play())
