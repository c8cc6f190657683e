"""An agent of smolagents that writes code, in two steps at most."""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel

model = OpenAIModel("tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
agent = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0, instructions="Be brief.")
print(agent.run(json.loads(sys.stdin.readline())["query"]))
