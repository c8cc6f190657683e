"""Pure environments: each a module with a constructor that returns an `Env`.

Modules:

    arithmetic      `arithmetic`: an expression over letters whose values are hidden
    contract_check  Check the contract of pure environments (E1)
    env             Common parts of pure environments
    lookup          `lookup`: multi-hop questions over knowledge bases, each kind of fact behind a tool of its own
    maze            `maze`: fetch a key and carry it to the goal through rooms of which only the present one's doors
    play            Play episodes of pure environments without a policy
"""

from flowgrpo.envs.arithmetic import Flaws, arithmetic
from flowgrpo.envs.contract_check import check_env
from flowgrpo.envs.env import (
    END,
    PAD,
    SPECIAL,
    SPLITS,
    absorbing,
    dealt,
    draw_task,
    hashed,
    in_words,
    pad_tokens,
    select,
    split_index,
    story,
)
from flowgrpo.envs.lookup import lookup
from flowgrpo.envs.maze import maze
from flowgrpo.envs.play import PLAYERS, play_many, transcript
