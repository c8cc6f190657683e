"""The dicts that map a flag's value to a constructor: one for each family."""

import flowgrpo as fg

ALGORITHMS = {
    "flow_grpo": fg.flow_grpo,
    "flow_grpo_released": fg.flow_grpo_released,
    "grpo": fg.grpo,
    "dr_grpo": fg.dr_grpo,
    "dapo": fg.dapo,
    "gspo": fg.gspo,
    "cispo": fg.cispo,
    "rloo": fg.rloo,
    "reinforce_pp": fg.reinforce_pp,
    "gigpo": fg.gigpo,
    "kimi": fg.kimi,
    "ppo": fg.ppo,
    "dpo": fg.dpo,
}

ENVIRONMENTS = {
    "lookup": fg.lookup,
    "arithmetic": fg.arithmetic,
    "maze": fg.maze,
}
