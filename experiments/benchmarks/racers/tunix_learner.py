"""Steps of tunix's GRPOLearner with its own sampler, or that sampler alone.

The learner's data wait for the race: a batch is asked for when a step begins, and the next when everything of that step
was done. One device, which takes all cores. An actor and a reference begin alike.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterator
from typing import Any

from . import protocol, workload
from .workload import ANSWER, END, GROUP, PROMPT, PROMPTS, VOCABULARY

NEVER = 10**6  # steps
NO_END = VOCABULARY + 7  # an id that never comes


def _open_model(shape: dict[str, Any]) -> Any:
    """A random model; tunix draws the embedding from N(0, 1), with which its first answers would be far from random."""
    from flax import nnx
    from tunix.models.qwen2.model import ModelConfig, Qwen2

    config = ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=int(shape["rope_theta"]),
        norm_eps=1e-6,
        use_tied_embedding=shape["tie_word_embeddings"],
    )
    model = Qwen2(config, rngs=nnx.Rngs(0))
    embedding = model.embedder.input_embedding
    embedding[...] = 0.02 * embedding[...]
    return model


def _open_cluster(job: protocol.RacerJob, mesh: Any) -> Any:
    """The actor, its reference where there is one, and tunix's sampler on one mesh."""
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.rollout.base_rollout import RolloutConfig

    roles = [rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT]
    learning = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(workload.CLIP), optax.adamw(workload.RATE)),
        eval_every_n_steps=NEVER,
        max_steps=NEVER,
        mini_batch_size=PROMPTS,
        train_micro_batch_size=PROMPTS,
    )
    lengths = {"max_tokens_to_generate": ANSWER, "max_prompt_length": PROMPT, "kv_cache_size": PROMPT + ANSWER}
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=learning,
        rollout_config=RolloutConfig(temperature=1.0, top_p=1.0, top_k=None, eos_tokens=[END], **lengths),
    )
    return rl_cluster.RLCluster(
        actor=_open_model(job.shape),
        reference=_open_model(job.shape) if workload.training(job.case).beta else None,
        tokenizer=workload.open_tokenizer(),
        cluster_config=config,
    )


def _train(lane: protocol.Lane, job: protocol.RacerJob) -> None:
    """Train until the race is over."""
    import jax
    import numpy as np
    from flax import nnx
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

    lengths: list[int] = []

    def pay(prompts, completions: list[str], **_: Any) -> list[float]:  # noqa: ARG001
        answers = [[workload.WORDS.index(word) for word in text.split()] for text in completions]
        lengths.extend(map(len, answers))
        return [workload.fraction_of_digits(ids) for ids in answers]

    def batches() -> Iterator[dict]:
        texts = [workload.spell(ids) for ids in workload.random_ids(PROMPTS)]
        while True:
            lengths.clear()
            lane.wait()
            yield {"prompts": np.array(texts)}
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            lane.done(sum(lengths))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        cluster = _open_cluster(job, mesh)
        settings = GRPOConfig(
            num_generations=GROUP, num_iterations=1, beta=workload.training(job.case).beta, epsilon=0.2
        )
        GRPOLearner(rl_cluster=cluster, reward_fns=pay, algo_config=settings).train(batches())


def _sample(lane: protocol.Lane, job: protocol.RacerJob) -> None:
    """Sample a block of rows in every step."""
    from itertools import count

    from tunix.generate.sampler import CacheConfig, Sampler

    rows, tokens = workload.decoding(job.case)
    model = _open_model(job.shape)
    heads = {"num_layers": model.config.num_layers, "num_kv_heads": model.config.num_kv_heads}
    cache = CacheConfig(cache_size=PROMPT + tokens, head_dim=model.config.head_dim, **heads)
    sampler = Sampler(model, workload.open_tokenizer(), cache)
    drawn = {"temperature": 1.0, "top_p": 1.0, "eos_tokens": [NO_END]}
    lengths = {"max_generation_steps": tokens, "max_prompt_length": PROMPT}
    texts = [workload.spell(ids) for ids in workload.random_ids(rows)]
    for seed in count():
        lane.wait()
        found = sampler(texts, seed=seed, **lengths, **drawn)
        assert all(len(ids) == tokens for ids in found.tokens)
        lane.done(rows * tokens)


def main() -> None:
    """Train, or sample alone, as the case wants it."""
    lane, job = protocol.open_lane()
    (_train if workload.trains(job.case) else _sample)(lane, job)


if __name__ == "__main__":
    main()
