"""Environments of somebody else's: TRL-style classes, gymnasium, textarena, OpenEnv servers.

Modules:

    env      An environment of somebody else's as a host environment: what it shows is said in a conversation
    process  The process that environments of somebody else's live in, as the effect of kind "env"
    worker   Keep environments of somebody else's in a process of their own; needs the standard library alone
"""

from flowgrpo.external_envs.env import external_env
from flowgrpo.external_envs.process import EnvProcess
