"""The agent system (A1): roles that answer a query with tools, as a host environment.

Modules:

    action_forms    Forms of a planner's action: instructions, writing and parsing
    examples        Worked examples for a planner's prompt
    rendering       Render a state as the prompt of a role: a fresh context in each turn, or one that grows
    role_backends   Answer the calls of untrained roles, by an engine or a server
    roles           Roles of an agent system: the prompt of each, and how its text is parsed
    single_turn     Single-turn question answering
    state           State of one trajectory: an immutable value that can be saved, forked and replayed (A2)
    system          The agent system as a host environment (A1)
    transcript      The trajectory of an agent system as text to read
"""

from flowgrpo.agent.action_forms import ACTION_FORMS, CALLS, LINES, TOOL_CALLS, ActionForm
from flowgrpo.agent.examples import worked_examples
from flowgrpo.agent.rendering import fresh_context, growing_context
from flowgrpo.agent.role_backends import endpoint_role, frozen_role, route_calls
from flowgrpo.agent.roles import Role, analyst, executor, generator, planner, verifier
from flowgrpo.agent.single_turn import single_turn
from flowgrpo.agent.state import AgentState, Budget, Memory
from flowgrpo.agent.system import AgentLimits, AgentRoles, agent_system
from flowgrpo.agent.transcript import show_transcript
from flowgrpo.data.tool_calls import signature
