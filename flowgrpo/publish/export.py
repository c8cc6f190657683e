"""Export a run's planner: `export` as a model folder, `export_gguf` as GGUF, `export_adapter` as a PEFT adapter.

`read_config` reads a run's settings, and `read_planner` a checkpoint's planner. The planner of a pure environment is
exported as a small Llama whose tokenizer has the environment's words; GGUF has no form for such a tokenizer.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from flowgrpo.data.tokenizer import load_tokenizer, start_conversation
from flowgrpo.envs.env import END, PAD
from flowgrpo.models import families
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.gguf_export import save_gguf_folder
from flowgrpo.models.hf import Model, load_model, save_model
from flowgrpo.models.lora import LoraParams, merge_adapter
from flowgrpo.models.peft import save_adapter
from flowgrpo.models.trainable import ActorCritic, actor_params
from flowgrpo.publish.model_card import CardFacts, model_card
from flowgrpo.recipes import agent_config, cluster_config, own_agent, own_env, pure, self_verify_tasks
from flowgrpo.recipes.registry import make_env
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.config import RunConfig
from flowgrpo.training.planner import PlannerConfig, frozen_base_dtype, lora_of
from flowgrpo.training.run_dir import RUN, START, read_run
from flowgrpo.training.session import PARAMS
from flowgrpo.types import BadInput

CONFIGS: dict[str, type[RunConfig]] = {
    "pure": pure.Config,
    "agent": agent_config.Config,
    "cluster": cluster_config.Config,
    "own_agent": own_agent.Config,
    "own_env": own_env.Config,
    "self_verify": self_verify_tasks.Config,
}

# Reading a run ------------------------------------------------------------------------------------------


def read_planner(folder: Path, which: str) -> tuple[int, Any]:
    """The update and the parameters of a checkpoint's planner: its adapter, if it has one.

    `which` is "best" in validation, "last", or "start".
    """
    checkpoints = Checkpoints(folder, best="validation")
    last = checkpoints.latest()
    if last is None:
        raise BadInput(f"{folder} has no checkpoint yet: continue the run")
    if which == "start":
        return 0, _planner(checkpoints.restore_part(last, "start"))
    step = checkpoints.best() if which == "best" else last
    step = last if step is None else step
    return step, _planner(checkpoints.restore_part(step, PARAMS))


def _planner(stored: Mapping[str, Any]) -> Any:
    """The planner's parameters in a checkpoint, which stores a pair of actor and critic as a mapping."""
    params = actor_params(ActorCritic(**stored)) if set(stored) == set(ActorCritic._fields) else stored
    return jax.tree.map(jnp.asarray, params)


def read_config(folder: Path) -> RunConfig:
    """The Config with which a run of RL was last started."""
    run = read_run(folder)
    if run["recipe"] not in CONFIGS:
        raise BadInput(f"{folder} is a run of {run['recipe']}: give one of {', '.join(CONFIGS)}")
    try:
        return CONFIGS[run["recipe"]].from_json(run["settings"])
    except BadInput as error:
        raise BadInput(f"{folder / RUN}: {error}; it was written by another version") from None


def load_start_model(config: RunConfig, folder: Path) -> Model:
    """The start of a run: shape, tokenizer, and the weights under an adapter."""
    if isinstance(config, pure.Config):
        return word_model(config)
    assert isinstance(config, PlannerConfig)
    return load_model(start_model_path(config, folder), dtype=config.dtype, quantised=frozen_base_dtype(config))


def start_model_path(config: PlannerConfig, folder: Path) -> str | Path:
    """The folder or hub id of a run's start."""
    return config.model or folder / START


# Planners of pure environments -------------------------------------------------------------------------------------


def word_model(config: pure.Config) -> Model:
    """The planner of a pure environment as a Llama of the same shape, without parameters."""
    env = make_env(config.env)
    decoder = pure.small_decoder_config(env, config)
    hf_config = llama_config(decoder)
    tokenizer: Any = SimpleNamespace(save=partial(write_words, words=env.vocabulary))
    return Model(make_policy(decoder), {}, tokenizer, families.decoder_config(hf_config), hf_config)


def llama_config(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a small decoder."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.v,
        "hidden_size": config.d,
        "intermediate_size": config.f,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.h,
        "num_key_value_heads": config.k,
        "head_dim": config.e,
        "hidden_act": config.activation,
        "max_position_embeddings": 4096,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.ropes[0].theta,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_scale,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }


def write_words(folder: Path, words: Sequence[str]) -> None:
    """Write a tokenizer for transformers, in which each word is a token whose id is its number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[END], pad_token=words[PAD])
    fast.save_pretrained(folder)


# Writing ------------------------------------------------------------------------------------------------


def export(folder: Path, out: Path, *, which: str = "best", licence: str | None = None) -> dict[str, Any]:
    """Write a run's planner as a model folder, with a model card -> a record of it.

    Args:
        folder: of the run.
        out: folder to write; one that is there is replaced.
        which: checkpoint, best in validation, last, or start.
        licence: of the weights; None: that of the base model.
    """
    model, facts = _whole_model(folder, out, which, licence)
    save_model(out, model, card=model_card(facts))
    return _written(out, facts, model.params)


def export_gguf(
    folder: Path, out: Path, *, tensor_type: str = "f16", which: str = "best", licence: str | None = None
) -> dict[str, Any]:
    """Write a run's planner as GGUF, with a Modelfile and a model card -> a record of it.

    Args:
        folder: of the run.
        out: folder to write; one that is there is replaced.
        tensor_type: of the matrices: f16, bf16, f32 or q8_0.
        which: checkpoint, best in validation, last, or start.
        licence: of the weights; None: that of the base model.
    """
    if out.suffix == ".gguf":
        raise BadInput(
            f"--out={out} names a file, and a folder is written, with a Modelfile: give {out.with_suffix('')}"
        )
    if isinstance(read_config(folder), pure.Config):
        raise BadInput(f"the planner of {folder} speaks in whole words, which GGUF has no form for: leave out --format")
    model, facts = _whole_model(folder, out, which, licence)
    facts = facts._replace(gguf=tensor_type)
    temperature = getattr(facts.config, "temperature", None)
    save_gguf_folder(out, model, tensor_type=tensor_type, temperature=temperature, card=model_card(facts))
    return {**_written(out, facts, model.params), "gguf_type": tensor_type}


def _whole_model(folder: Path, out: Path, which: str, licence: str | None) -> tuple[Model, CardFacts]:
    """The planner of a checkpoint with its adapter merged into its base, and the facts of its card."""
    config = read_config(folder)
    step, params = read_planner(folder, which)
    _check_out(config, folder, out)
    model = load_start_model(config, folder)
    lora = lora_of(config) if isinstance(config, PlannerConfig) else None
    if lora is not None:
        params = merge_adapter(LoraParams(model.params, params), model.config, lora)
    facts = CardFacts(read_run(folder)["recipe"], config, folder, step, which, licence=licence)
    return model._replace(params=params), facts


def _written(out: Path, facts: CardFacts, params: Any) -> dict[str, Any]:
    return {"out": str(out), "which": facts.which, "update": facts.update, "params_sha256": params_sha256(params)}


def export_adapter(folder: Path, out: Path, *, which: str = "best", licence: str | None = None) -> dict[str, Any]:
    """Write a run's adapter in PEFT's format, with a model card -> a record of it; arguments as in `export`."""
    config = read_config(folder)
    lora = lora_of(config) if isinstance(config, PlannerConfig) else None
    if lora is None:
        raise BadInput(f"{folder} trains all parameters and has no adapter: leave out --adapter")
    assert isinstance(config, PlannerConfig)
    step, adapter = read_planner(folder, which)
    _check_out(config, folder, out)
    model = load_start_model(config, folder)
    base = config.model or str(Path(start_model_path(config, folder)).resolve())
    facts = CardFacts(read_run(folder)["recipe"], config, folder, step, which, adapter=True, licence=licence)
    save_adapter(out, adapter, model.config, lora, base_model=base, card=model_card(facts))
    return _written(out, facts, adapter)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder has a chat template that can render a user's message."""
    try:
        start_conversation(load_tokenizer(folder), [{"role": "user", "content": "x"}])
    except BadInput:
        return False
    return True


def _check_out(config: RunConfig, folder: Path, out: Path) -> None:
    """Raise `BadInput` if `out` is a run or the start of this one, since writing replaces the whole folder."""
    if (out / RUN).exists():
        raise BadInput(f"--out={out} is the folder of a run: give another one, such as {out / 'model'}")
    if not isinstance(config, PlannerConfig):
        return
    start = Path(start_model_path(config, folder)).resolve()
    if out.resolve() in (start, start.parent if start.is_file() else start):
        raise BadInput(f"--out={out} is the model that the run started with: give another folder")
