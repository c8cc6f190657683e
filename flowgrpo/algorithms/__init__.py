"""The family: every algorithm is *advantages* x *ratio and clip* x *aggregation* + *KL*.

`advantage`, `weight` and `loss` hold the shared parts, `options` what they combine with;
`policy_gradient`, `ppo` and `dpo` hold the constructors.
"""
