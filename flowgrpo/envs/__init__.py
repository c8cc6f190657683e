"""Environments: pure ones, each a module with a constructor that returns an `Env`, and `TextEnv` for those of text.

Modules:

    arithmetic      `arithmetic`: an expression over letters whose values are hidden
    contract_check  Check the contract of pure environments (E1)
    env             Common parts of pure environments
    lookup          `lookup`: multi-hop questions over a knowledge base, each relation behind a tool of its own
    maze            `maze`: fetch a key and carry it to the goal, with only the doors of the current room in view
    play            Play episodes of pure environments without a policy
    text            `TextEnv`: strings in, strings out, tools as functions
"""

from flowgrpo.envs.arithmetic import Flaws, arithmetic
from flowgrpo.envs.contract_check import check_env
from flowgrpo.envs.env import (
    END,
    PAD,
    SPECIAL,
    SPLITS,
    absorbing,
    draw_task,
    format_trajectory,
    hash_ints,
    in_split,
    pad_tokens,
    select,
    split_index,
    to_words,
)
from flowgrpo.envs.lookup import lookup
from flowgrpo.envs.maze import maze
from flowgrpo.envs.play import PLAYERS, play_episodes, transcript
from flowgrpo.envs.text import Done, TextEnv, single_turn
