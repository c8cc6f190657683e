"""flowgrpo: training language-model agents that act over several turns with tools, by Flow-GRPO.

    tasks -> rollout -> Trajectories -> rewards -> advantages -> pack -> Batch -> update -> params

What people compose is here; the modules hold the rest.
"""

from flowgrpo import masked
from flowgrpo.agent.question import question
from flowgrpo.agent.rendering import appending, fresh
from flowgrpo.agent.speak import either, remote_speaker, speaker
from flowgrpo.agent.system import agent_system
from flowgrpo.algorithms.advantage import (
    gae,
    group_center,
    group_zscore,
    leave_one_out,
    mixed_groups,
    multi_turn_group_advantage,
)
from flowgrpo.algorithms.compose import compose, last_turn_only, newest_segment_only
from flowgrpo.algorithms.dpo import Pairs, dpo, dpo_pairs
from flowgrpo.algorithms.options import Correction, Options, Overlong, kl_estimate, overlong_penalty
from flowgrpo.algorithms.policy_gradient import (
    cispo,
    dapo,
    dr_grpo,
    flow_grpo,
    flow_grpo_released,
    gigpo,
    grpo,
    gspo,
    kimi,
    reinforce_pp,
    rloo,
)
from flowgrpo.algorithms.ppo import ppo, token_gae, turn_gae
from flowgrpo.algorithms.weight import exclude_versions_before, flow_weights, sequence_mean, sequence_sum, token_mean
from flowgrpo.contracts import (
    Algorithm,
    Call,
    Completion,
    Env,
    Generate,
    HostEnv,
    HostStep,
    Observation,
    Policy,
    Request,
    Result,
    Reward,
    Said,
    Scored,
    Scores,
    Sizes,
    Step,
    Tool,
)
from flowgrpo.envs.arithmetic import arithmetic
from flowgrpo.envs.checks import check_env
from flowgrpo.envs.lookup import lookup
from flowgrpo.envs.maze import maze
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.remote import remote
from flowgrpo.generate.sampler import logprobs
from flowgrpo.layouts import place, rows_by_trajectory, rows_by_turn, unpack
from flowgrpo.learner.state import LearnerState, init_learner, make_optimizer
from flowgrpo.learner.update import check_mini_batches, make_update
from flowgrpo.models.hf import Model, init_model, load_model, save_model
from flowgrpo.models.lora import LoraConfig, lora_policy, merge
from flowgrpo.packing import account, fill_rate, pack
from flowgrpo.ragged import collate
from flowgrpo.rewards.router import router, score_async
from flowgrpo.rollout.checks import check_host_env
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import Played, rollout_of
from flowgrpo.rollout.replay import replay
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.task_files import read_tasks
from flowgrpo.tasks import Tasks, batch_at, split_tasks, task_at
from flowgrpo.text import Conversation, add_action, add_messages, load_text, start
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import toolset
from flowgrpo.types import ENDINGS, BadInput, Batch, Fate, Ledger, Status, Task, Trajectories, Trajectory, Turn

__version__ = "0.1.0"
