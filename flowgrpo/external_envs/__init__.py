"""Environments of other libraries: TRL-style classes, gymnasium, textarena, OpenEnv servers.

    with EnvProcess("gymnasium", "Taxi-v3") as process:
        env = conversation_env(text, turns=20, max_tokens=16, context_tokens=1024)     of `rollout.conversation_env`
        hosted(env, engine.submit, call_tool=process.call_tool)(tasks, keys, groups)

Modules:

    process  `EnvProcess`: the process that external environments run in, as the effect of kind "env"
    worker   The program of that process; needs nothing but the standard library
"""

from flowgrpo.external_envs.process import EnvProcess
