"""The agent system as a host environment: planner, executor, verifier, generator and memory around injected effects.

Modules:

    rendering      Render a state as the tokens that its role is shown
    role_backends  Answer for the roles that are not trained
    roles          Ask the roles of an agent system, and read what they say
    single_turn    Ask one question for one answer: `question` makes an environment whose only action is its output
    state          Hold the state of one trajectory of the agent system, an immutable value that can be saved
    system         Run the agent system as a host environment (A1)
    transcript     Show a trajectory of an agent system as text to read, from its last state and its recorded turns
"""

from flowgrpo.agent.rendering import appending, fresh
from flowgrpo.agent.role_backends import either, remote_speaker, speaker
from flowgrpo.agent.roles import Role, analyst, executor, generator, planner, signature, verifier
from flowgrpo.agent.single_turn import question
from flowgrpo.agent.state import AgentState, Budget, Memory
from flowgrpo.agent.system import agent_system
from flowgrpo.agent.transcript import show_transcript
