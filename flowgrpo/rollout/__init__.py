"""Rollouts: compiled for pure environments, hosted for the rest.

Modules:

    compiled            Compiled rollouts of pure environments, and their figures
    contract_check      Check the contract of host environments: raise where a rule is broken, or return what was played
    demonstrations      Record demonstrations on a host environment, in exact tokens
    effects             Record what tools, roles and rewards answered, and give the same answers again (A2, S1)
    exams               Fresh tasks of an environment, and examinations on them
    host_adapter        A pure environment as a host environment, so that whatever plays those plays these too (E2)
    hosted              Roll out host environments: `hosted` makes a function from tasks and keys to judged trajectories
    hosted_run          One hosted rollout under way, as the caller's thread runs it
    judging             Judge groups of trajectories while others still play, whatever the reward does
    records             Records of hosted rollouts
    replay              A recorded trajectory gone through again (A2)
    trajectory_builder  Build one trajectory from what its environment says and its policy chooses
    trajectory_thread   Play one trajectory in a thread of its own
    trajectory_view     Show trajectories: turn records and arrays into what the viewer displays
"""

from flowgrpo.rollout.compiled import make_rollout, repeat, shuffled_rewards, tool_mix
from flowgrpo.rollout.contract_check import check_host_env
from flowgrpo.rollout.demonstrations import demonstrate
from flowgrpo.rollout.exams import draw_tasks, make_evaluation, make_exam
from flowgrpo.rollout.host_adapter import as_host
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import Played, from_json, rollout_of, to_json
from flowgrpo.rollout.replay import last_state, replay
from flowgrpo.rollout.trajectory_view import records_of, shown_trajectory, speller, word_speller
