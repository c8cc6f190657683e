"""The small planner of a pure environment, whose tokens are the environment's words: its shape, and how it is read.

It is read as a Llama of the same shape, with a tokenizer for transformers in which each word is a token.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flowgrpo.contracts import Env
from flowgrpo.envs.env import END, PAD
from flowgrpo.learner.update import ScoreSettings
from flowgrpo.models import families
from flowgrpo.models.config import DecoderConfig, small_config
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model
from flowgrpo.recipes.planner_reader import PlannerReader, RecordedScoring
from flowgrpo.recipes.pure_config import Config
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects
from flowgrpo.recipes.registry import make_env
from flowgrpo.rollout.trajectory_view import TokenDecoder, make_word_decoder
from flowgrpo.training.pure_env import max_trajectory_tokens
from flowgrpo.types import Params

SCORED_ROWS = 16  # rows of a block whose recorded tokens are scored


def small_decoder_config(env: Env, config: Config) -> DecoderConfig:
    """The shape of a small decoder over the vocabulary of an environment."""
    return small_config(
        len(env.vocabulary), d=config.model.model_dim, layers=config.model.layers, head=config.model.head_dim
    )


def word_model(config: Config, objects: Objects = NO_OBJECTS) -> Model:
    """The planner of a pure environment as a Llama of the same shape, without parameters."""
    env = objects.env if isinstance(objects.env, Env) else make_env(config.environment.env)
    decoder = objects.model if isinstance(objects.model, DecoderConfig) else small_decoder_config(env, config)
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


def _token_decoder(config: Config, _folder: Path, _tokenizer: str | None = None) -> TokenDecoder:
    return make_word_decoder(make_env(config.environment.env).vocabulary)


def _scoring(config: Config, _folder: Path, params: Params) -> RecordedScoring:
    settings = ScoreSettings(temperature=config.rollout.temperature, banned=(PAD,))
    slots = max_trajectory_tokens(make_env(config.environment.env))
    return RecordedScoring(word_model(config).policy, params, settings, SCORED_ROWS, slots)


WORDS = PlannerReader(
    start_path=lambda _config, _folder: None,
    load_start=lambda config, _folder, objects: word_model(config, objects),
    token_decoder=_token_decoder,
    scoring=_scoring,
    replaced_by=("env", "model"),
)
