"""The gateway: agents that know nothing of training, behind a server that speaks the API of OpenAI.

Modules:

    agent_env   An agent of somebody else's as a host environment: what it asks for is what the environment says
    agent_start  Start an agent: a program for each trajectory, a function, or one in a process of its own
    agent_worker  Run an agent's function in a process of its own, for many trajectories at once
    agents      Run agents of somebody else's, a program or a function, behind a gateway
    doors       Who may send what to a gateway
    histories   Find where a request of an agent goes on from
    live_session  One agent at work, between the server and the thread that plays its trajectory
    responses   Requests and answers of /v1/responses, as far as agents need them; pure
    serving     Serve a model: answer requests of no session, and record sessions of agents that run elsewhere
    server      The HTTP server of a gateway
    tool_calls  Find the tool calls in what a model wrote, in the form that its chat template teaches
    wire        Requests and answers of the OpenAI API as values, from and to JSON; pure
"""

from flowgrpo.gateway.agent_env import agent_env
from flowgrpo.gateway.agents import AgentHost
from flowgrpo.gateway.server import Gateway
from flowgrpo.gateway.serving import Served
