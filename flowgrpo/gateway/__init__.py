"""The gateway: an HTTP server with the OpenAI API, behind which unmodified agents are trained.

Modules:

    agent_env      An external agent as a host environment: its requests are the observations
    agent_start    Start an external agent: a program for each trajectory, a function, or a function in another process
    agent_worker   The process that calls an external agent's function
    agents         `AgentHost`: run external agents behind a gateway
    auth           Who may send which requests to a gateway: tokens, host names, origins, idle connections
    histories      Find which earlier response a request continues
    live_session   A session of one external agent, between the server and the thread of its trajectory
    responses      Requests and responses of /v1/responses; pure functions
    server         `Gateway`: the HTTP server
    serving        `ModelServer`: answer requests without a session, and record sessions of agents that run elsewhere
    wire           Requests and responses of the OpenAI API as values, and their JSON; pure functions
"""

from flowgrpo.gateway.agent_env import agent_env
from flowgrpo.gateway.agents import AgentHost
from flowgrpo.gateway.auth import AccessPolicy
from flowgrpo.gateway.server import Gateway
from flowgrpo.gateway.serving import ModelServer, ServerSettings
