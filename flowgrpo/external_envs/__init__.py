"""Environments of other libraries: TRL-style classes, gymnasium, textarena, OpenEnv servers.

Modules:

    env      An external environment as a host environment: its observations are messages of a conversation
    process  `EnvProcess`: the process that external environments run in, as the effect of kind "env"
    worker   The program of that process; needs nothing but the standard library
"""

from flowgrpo.external_envs.env import external_env
from flowgrpo.external_envs.process import EnvProcess
