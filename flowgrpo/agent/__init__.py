"""The agent system as a host environment: planner, executor, verifier, generator and memory around injected effects.

Modules:

    action_forms    Forms in which a planner writes its action
    examples        Worked examples for a planner's prompt
    rendering       Render a state as the tokens that its role is shown
    role_backends   Answer for the roles that are not trained
    roles           Ask the roles of an agent system, and read what they say
    single_turn     Ask one question for one answer: `question` makes an environment whose only action is its output
    state           Hold the state of one trajectory of the agent system, an immutable value that can be saved
    system          Run the agent system as a host environment (A1)
    tool_arguments  Tools as an agent's prompts show them, and the arguments of a call
    transcript      Show a trajectory of an agent system as text to read, from its last state and its recorded turns
"""

from flowgrpo.agent.action_forms import ACTION_FORMS, CALLS, LINES, TOOL_CALLS, ActionForm
from flowgrpo.agent.examples import worked_examples
from flowgrpo.agent.rendering import appending, fresh
from flowgrpo.agent.role_backends import either, remote_speaker, speaker
from flowgrpo.agent.roles import Role, analyst, executor, generator, planner, verifier
from flowgrpo.agent.single_turn import question
from flowgrpo.agent.state import AgentState, Budget, Memory
from flowgrpo.agent.system import agent_system
from flowgrpo.agent.tool_arguments import signature
from flowgrpo.agent.transcript import show_transcript
