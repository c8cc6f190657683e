"""Rollouts: compiled for pure environments, hosted for others.

Modules:

    compiled            Compiled rollouts of pure environments
    contract_check      Check the contract of host environments: `check_host_env`
    conversation_env    An environment of text as a host environment: observations are messages of a conversation
    demonstrations      Record demonstrations on a host environment, in exact tokens
    effects             Record the results of tools, roles and rewards, and return the same results again (A2, S1)
    exams               Evaluation of a policy on fresh tasks of a pure environment
    host_adapter        A pure environment as a host environment (E2)
    hosted              Roll out host environments: `hosted` makes a function from tasks and keys to trajectories
    judging             Call the reward for groups of trajectories while others are still rolled out
    records             Recorded trajectories, as values and as lines of JSON
    replay              Replay a recorded trajectory (A2)
    text_env            Play a `TextEnv` in this process: `TextEnvRunner` answers the effects of its conversation
    trajectory_builder  Build one trajectory from the results of its environment and the completions of its policy
    trajectory_thread   Run one trajectory in a thread of its own: reset, ask the policy, step, until it has ended
    trajectory_view     Convert trajectories, recorded or in arrays, to what the viewer displays
"""

from flowgrpo.rollout.compiled import make_rollout, repeat, shuffled_rewards, tool_counts
from flowgrpo.rollout.contract_check import check_host_env
from flowgrpo.rollout.demonstrations import demonstrate
from flowgrpo.rollout.exams import draw_tasks, make_evaluation, make_evaluation_rollout
from flowgrpo.rollout.host_adapter import as_host
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import RecordedTrajectory, from_json, to_json, to_trajectories
from flowgrpo.rollout.replay import last_state, replay
from flowgrpo.rollout.text_env import TextEnvRunner
from flowgrpo.rollout.trajectory_view import make_token_decoder, make_word_decoder, shown_trajectory, to_records
