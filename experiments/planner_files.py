"""Files that `experiments.export` writes: a run's planner from its checkpoints, as a model folder or an adapter."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

import flowgrpo as fg
from experiments import agent_setups, self_verify_setup, setups
from experiments.lora_setup import lora_of
from experiments.members import make_env
from experiments.session import PARAMS
from flowgrpo.envs.env import END, PAD
from flowgrpo.learner.checkpoint import Checkpoints, params_sha256
from flowgrpo.learner.critic import ActorCritic, acting
from flowgrpo.learner.folder import RUN, read_run
from flowgrpo.models import families
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model, load_model, save_model
from flowgrpo.models.lora import Adapted, LoraConfig, merge
from flowgrpo.models.peft import save_adapter

WHICH = ("best", "last", "start")  # in validation, of all, the start of the training

# What there is ------------------------------------------------------------------------------------------


def read_planner(folder: Path, which: str) -> tuple[int, Any]:
    """The update and the parameters of a checkpoint's planner; of an adapted one, its adapter."""
    checkpoints = Checkpoints(folder, best="validation")
    last = checkpoints.latest()
    if last is None:
        raise fg.BadInput(f"{folder} has no checkpoint yet: let the run go on")
    if which == "start":
        return 0, _planner(checkpoints.part(last, "start"))
    step = checkpoints.best() if which == "best" else last
    step = last if step is None else step
    return step, _planner(checkpoints.part(step, PARAMS))


def _planner(stored: Mapping[str, Any]) -> Any:
    """The planner's own parameters of what a checkpoint holds, where a pair of actor and critic is a mapping."""
    own = acting(ActorCritic(**stored)) if set(stored) == set(ActorCritic._fields) else stored
    return jax.tree.map(jnp.asarray, own)


def base_model(settings: Mapping[str, Any], folder: Path) -> Model:
    """The model that a run began with: shape, tokenizer, and the weights that no adapter changes."""
    return word_model(settings) if "env" in settings else load_model(base(settings, folder), dtype=settings["dtype"])


def base(settings: Mapping[str, Any], folder: Path) -> str | Path:
    """Locate the model that a run on the agent system began with: a folder or a hub id."""
    start = agent_setups.START if "exam_turns" in settings else self_verify_setup.START
    return settings["model"] or folder / start


# A planner of words -------------------------------------------------------------------------------------


def word_model(settings: Mapping[str, Any]) -> Model:
    """The model of a quickstart as a Llama, of the same shape; without parameters."""
    env = make_env(settings["env"])
    config = setups.shape(env, settings)
    source, text = llama(config), SimpleNamespace(save=partial(write_words, words=env.words))
    return Model(make_policy(config), {}, text, families.decoder_config(source), source)


def llama(config: DecoderConfig) -> dict[str, Any]:
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
    """A tokenizer for transformers: each word is a token, and its number the id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[END], pad_token=words[PAD])
    fast.save_pretrained(folder)


# Writing ------------------------------------------------------------------------------------------------


def export(folder: Path, out: Path, *, which: str = "best") -> dict[str, Any]:
    """Write a run's planner as a whole model -> what was written."""
    settings = read_run(folder)["settings"]
    step, params = read_planner(folder, which)
    _check_out(settings, folder, out)
    model, lora = base_model(settings, folder), lora_of(settings)
    if lora is not None:
        params = merge(Adapted(model.params, params), model.config, lora)
    save_model(out, model._replace(params=params))
    return {"out": str(out), "which": which, "update": step, "params_sha256": params_sha256(params)}


def export_adapter(folder: Path, out: Path, *, which: str = "best") -> dict[str, Any]:
    """Write a run's adapter alone."""
    settings = read_run(folder)["settings"]
    lora = _adapter_of(settings, folder)
    step, adapter = read_planner(folder, which)
    _check_out(settings, folder, out)
    model = base_model(settings, folder)
    named = settings["model"] or str(Path(base(settings, folder)).resolve())
    save_adapter(out, adapter, model.config, lora, base_model=named)
    return {"out": str(out), "which": which, "update": step, "params_sha256": params_sha256(adapter)}


def _check_out(settings: Mapping[str, Any], folder: Path, out: Path) -> None:
    """Raise `BadInput` where a run is, or the model that it goes on from: what is written replaces a whole folder."""
    if (out / RUN).exists():
        raise fg.BadInput(f"--out={out} is the folder of a run: give another one, such as {out / 'model'}")
    if "env" not in settings and Path(base(settings, folder)).resolve() == out.resolve():
        raise fg.BadInput(f"--out={out} is the model that the run began with: give another folder")


def _adapter_of(settings: Mapping[str, Any], folder: Path) -> LoraConfig:
    lora = lora_of(settings)
    if lora is None:
        raise fg.BadInput(f"{folder} trains all parameters and has no adapter: leave out --adapter")
    return lora
