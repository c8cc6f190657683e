"""Export: the folder that is written opens, and computes what the run's planner computed."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flowgrpo.models.families import decoder_config
from flowgrpo.models.hf import load_model, save_model
from flowgrpo.models.lora import LoraParams, init_adapter, lora_policy
from flowgrpo.models.peft import load_adapter
from flowgrpo.models.trainable import ADAPTER, ActorCritic
from flowgrpo.publish.export import (
    export,
    export_adapter,
    export_gguf,
    has_chat_template,
)
from flowgrpo.recipes import agent_config, pure, pure_config
from flowgrpo.recipes.agent import START
from flowgrpo.recipes.offline_start import write_model
from flowgrpo.recipes.registry import make_env
from flowgrpo.recipes.word_planner import llama_config, word_model
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.config import RunConfig
from flowgrpo.training.names import BASE_DTYPES
from flowgrpo.training.planner import load_start, lora_of
from flowgrpo.training.run_dir import check_run
from flowgrpo.training.stages import init_train_state
from flowgrpo.types import BadInput
from tests.experiments.conftest import check_refused, last_line

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
HOSTED = agent_config.preset()
WORDS = pure.preset("lookup", model_dim=32, layers=1)


def moved(params, seed: int):
    """Other parameters of the same shapes."""
    random = np.random.default_rng(seed)

    def step(x):
        return jnp.asarray((np.asarray(x, np.float32) + 0.1 * random.standard_normal(x.shape)).astype(x.dtype))

    return jax.tree.map(step, params)


def write_run(folder: Path, config: RunConfig, start, *, trained: list) -> None:
    """A run with checkpoints of these parameters, of which the first was best."""
    check_run(folder, "pure" if isinstance(config, pure.Config) else "agent", config.to_json())
    checkpoints, host = Checkpoints(folder, keep=9), jax.device_get(start)
    for step, params in enumerate(trained, 1):
        run = init_train_state(params, optax.sgd(0.1), jax.random.key(0))
        checkpoints.save(step, {"run": run, "start": host}, {"validation": 1 / step})


def logits(policy, params) -> np.ndarray:
    tokens_rs = np.arange(1, 13).reshape(2, 6)
    positions_rs = np.broadcast_to(np.arange(6), (2, 6))
    return np.asarray(jax.jit(policy.apply)(params, tokens_rs, positions_rs, np.ones((2, 6), int))[0])


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Path:
    """A folder with the model that a hosted run begins with."""
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / START, ["one two three four five six"] * 3, seed=0, shape=SHAPE, vocab_size=300)
    return folder


@pytest.fixture
def run(started, tmp_path) -> Path:
    (tmp_path / START).symlink_to(started / START)
    return tmp_path


@pytest.mark.slow
def test_a_hosted_run_is_exported_with_its_tokenizer(run, tmp_path):
    model = load_model(run / START)
    states = {"start": model.params, "best": moved(model.params, 1), "last": moved(model.params, 2)}
    write_run(run, HOSTED, states["start"], trained=[states["best"], states["last"]])
    for which, update in (("start", 0), ("last", 2), ("best", 1)):
        written = export(run, tmp_path / "out", which=which)
        again = load_model(tmp_path / "out")
        assert written["update"] == update
        assert params_sha256(again.params) == params_sha256(states[which]) == written["params_sha256"]
    assert (logits(again.policy, again.params) == logits(model.policy, states["best"])).all()
    assert again.tokenizer.encode("one six") == model.tokenizer.encode("one six")
    messages = [{"role": "user", "content": "one"}]
    assert again.tokenizer.hf_tokenizer.apply_chat_template(
        messages
    ) == model.tokenizer.hf_tokenizer.apply_chat_template(messages)
    assert has_chat_template(tmp_path / "out")
    for template in ("{{ raise_exception('no') }}", "{{ messages[0].content.nothing.at_all }}", None):
        written = tmp_path / "out" / "chat_template.jinja"
        written.unlink() if template is None else written.write_text(template)
        assert not has_chat_template(tmp_path / "out")


@pytest.mark.slow
def test_a_given_model_keeps_its_own_tokenizer_and_dtype(started, tmp_path):
    config = HOSTED.replace(model=str(started / START), dtype="bfloat16")
    model = load_model(started / START, dtype="bfloat16")
    write_run(tmp_path, config, model.params, trained=[moved(model.params, 1)])
    export(tmp_path, tmp_path / "out")
    again = load_model(tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert params_sha256(again.params) == params_sha256(moved(model.params, 1))


@pytest.mark.slow
def test_of_an_actor_and_its_critic_the_actor_is_written(run, tmp_path):
    model = load_model(run / START)
    critic = {"trunk": jnp.ones(3), "head": jnp.ones(2)}
    pair = ActorCritic(moved(model.params, 1), critic)
    write_run(run, HOSTED, ActorCritic(model.params, critic), trained=[pair])
    for which, params in (("best", pair.policy), ("start", model.params)):
        export(run, tmp_path / f"{which} model", which=which)
        assert params_sha256(load_model(tmp_path / f"{which} model").params) == params_sha256(params)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASE_DTYPES)
def test_an_adapter_is_merged_or_written_alone(run, tmp_path, base):
    config = HOSTED.replace(lora_rank=3, lora_alpha=6.0, lora_targets="q,v,down", base_dtype=base)
    model, lora = load_start(run / START, config.model), lora_of(config.model)
    assert lora is not None
    adapter = moved(init_adapter(jax.random.key(0), model.config, lora), 1)
    check_run(run, "agent", config.to_json())
    whole = LoraParams(model.params, adapter)
    state = init_train_state(whole, optax.sgd(0.1), jax.random.key(0), trainable=ADAPTER)
    part = state.replace(learner=state.learner.replace(params=adapter))  # as a session saves it
    Checkpoints(run).save(1, {"run": part, "start": jax.device_get(adapter)}, {"validation": 0.5})
    export(run, tmp_path / "merged")
    merged = load_model(tmp_path / "merged")
    expected = logits(lora_policy(model.config, lora), whole)
    assert np.abs(logits(merged.policy, merged.params) - expected).max() < 1e-5
    export_adapter(run, tmp_path / "adapter")
    again, stored = load_adapter(tmp_path / "adapter", model.config)
    assert again == lora
    assert all((stored[name] == adapter[name]).all() for name in adapter)
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(named) == (run / START).resolve()
    for name in ("merged", "adapter"):
        assert "update 1, the best one of the run" in (tmp_path / name / "README.md").read_text()


@pytest.fixture
def of_words(tmp_path):
    """A finished quickstart, and its policy, parameters and environment."""
    setup = pure.build(WORDS)
    params = setup.policy.init(jax.random.key(3))
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", WORDS, params, trained=[params])
    return tmp_path / "run", setup.policy, params, setup.env


@pytest.mark.slow
def test_a_quickstart_is_exported_as_a_small_llama(of_words, tmp_path, command):
    from transformers import AutoTokenizer

    folder, policy, params, env = of_words
    done = command("export", f"--out={tmp_path}/out", f"--workdir={folder}", "--which=last")
    assert "model.safetensors" in done.stdout
    assert "chat" not in done.stdout  # which needs a template
    assert last_line(done)["update"] == 1
    again = load_model(tmp_path / "out", tokenizer=False)
    assert np.abs(logits(again.policy, again.params) - logits(policy, params)).max() < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    said = " ".join(env.vocabulary[2:8])
    assert tokenizer.encode(said) == list(range(2, 8))
    assert tokenizer.decode(list(range(2, 8))) == said
    assert "quickstart --env=lookup" in (tmp_path / "out" / "README.md").read_text()
    no_name = command("export", f"--workdir={folder}", f"--out={tmp_path}/none", "--push_to_hub=planner", check=False)
    check_refused(no_name, "--push_to_hub=planner must be USER/NAME")
    assert not (tmp_path / "none").exists()
    own = command("export", f"--workdir={folder}", f"--out={folder}", check=False)
    check_refused(own, "is the folder of a run: give another one")


@pytest.mark.slow
@pytest.mark.parametrize("base", ["none", *BASE_DTYPES])
def test_M5_a_hosted_run_is_exported_as_gguf(run, tmp_path, base):
    """M5: the file is the checkpoint that was asked for, with its adapter merged into its base."""
    pytest.importorskip("gguf")
    config = HOSTED if base == "none" else HOSTED.replace(lora_rank=3, lora_alpha=6.0, base_dtype=base)
    model, out = load_model(run / START), tmp_path / "planner"
    if base == "none":
        whole = moved(model.params, 1)
        write_run(run, config, model.params, trained=[whole])
        expected = logits(model.policy, whole)
    else:
        model, lora = load_start(run / START, config.model), lora_of(config.model)
        assert lora is not None
        adapted = LoraParams(model.params, moved(init_adapter(jax.random.key(0), model.config, lora), 1))
        check_run(run, "agent", config.to_json())
        state = init_train_state(adapted, optax.sgd(0.1), jax.random.key(0), trainable=ADAPTER)
        part = state.replace(learner=state.learner.replace(params=adapted.adapter))
        Checkpoints(run).save(1, {"run": part, "start": jax.device_get(adapted.adapter)}, {"validation": 0.5})
        expected = logits(lora_policy(model.config, lora), adapted)
    written = export_gguf(run, out, tensor_type="f32")
    assert (written["update"], written["gguf_type"]) == (1, "f32")
    assert sorted(path.name for path in out.iterdir()) == ["Modelfile", "README.md", "planner.gguf"]
    again = load_model(out / "planner.gguf")
    assert np.abs(logits(again.policy, again.params) - expected).max() < 1e-5
    assert again.tokenizer.encode("one six 12") == model.tokenizer.encode("one six 12")
    messages = [{"role": "user", "content": "one"}]
    assert again.tokenizer.hf_tokenizer.apply_chat_template(
        messages
    ) == model.tokenizer.hf_tokenizer.apply_chat_template(messages)
    assert again.tokenizer.stop_ids == model.tokenizer.stop_ids
    assert f"PARAMETER temperature {config.rollout.temperature:g}\n" in (out / "Modelfile").read_text()
    card = (out / "README.md").read_text()
    assert 'library_name: "gguf"' in card
    assert "Whole weights in GGUF's F32, for llama.cpp and Ollama" in card
    with pytest.raises(BadInput, match="holds Modelfile, which is no part of a model"):
        export(run, out)


@pytest.mark.slow
def test_the_command_writes_gguf_and_says_what_is_wrong(run, of_words, tmp_path, command):
    pytest.importorskip("gguf")
    model, out = load_model(run / START), tmp_path / "planner"
    write_run(run, HOSTED, model.params, trained=[model.params])
    flags = (f"--workdir={run}", f"--out={out}")
    done = command("export", *flags, "--format=gguf", "--gguf_type=q8_0")
    assert last_line(done)["gguf_type"] == "q8_0"
    assert f"ollama create planner -f {out}/Modelfile" in done.stdout
    assert f"chat --model={out}/planner.gguf" in done.stdout
    (next_run := tmp_path / "next").mkdir()
    write_run(next_run, HOSTED.replace(model=str(out / "planner.gguf")), model.params, trained=[model.params])
    with pytest.raises(BadInput, match="is the model that the run started with"):
        export_gguf(next_run, out)
    export_gguf(next_run, tmp_path / "next model")
    assert "trained from `planner.gguf`" in (tmp_path / "next model" / "README.md").read_text()
    assert load_model(out / "planner.gguf").config.num_layers == model.config.num_layers
    check_refused(
        command("export", *flags, "--format=gguf", "--adapter", check=False), "alone: leave it out, or --format"
    )
    check_refused(command("export", *flags, "--gguf_type=q8_0", check=False), "is of --format=gguf: add it")
    unknown = command("export", *flags, "--format=gguf", "--gguf_type=q4_k", check=False)
    check_refused(unknown, "gguf_type", status=2)
    with pytest.raises(BadInput, match=r"planner.gguf names a file, and a folder is written"):
        export_gguf(run, tmp_path / "planner.gguf")
    with pytest.raises(BadInput, match="speaks in whole words, which GGUF has no form for: leave out --format"):
        export_gguf(of_words[0], tmp_path / "words")
    assert not (tmp_path / "words").exists()


@pytest.mark.oracle
def test_transformers_computes_the_same_from_an_exported_quickstart(of_words, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder, policy, params, _ = of_words
    export(folder, tmp_path / "out")
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = peer(torch.arange(1, 13).reshape(2, 6)).logits.numpy()
    assert np.abs(found - logits(policy, params)).max() < 1e-4


@pytest.mark.parametrize("env", list(pure_config.PRESETS))
def test_the_shape_of_every_preset_is_that_of_a_llama(env):
    config = pure.preset(env)
    decoder = pure.small_decoder_config(make_env(env), config)
    assert decoder_config(llama_config(decoder)) == decoder
    assert word_model(config).config == decoder


def test_what_can_not_be_exported_is_one_sentence(run, tmp_path):
    with pytest.raises(BadInput, match=r"holds no run: run.json is missing"):
        export(tmp_path / "nowhere", tmp_path / "out")
    check_run(run, "agent", HOSTED.to_json())
    with pytest.raises(BadInput, match="has no checkpoint yet: continue the run"):
        export(run, tmp_path / "out")
    with pytest.raises(BadInput, match="trains all parameters and has no adapter: leave out --adapter"):
        export_adapter(run, tmp_path / "out")
    model = load_model(run / START)
    write_run(run, HOSTED, model.params, trained=[model.params | {"embed": jnp.ones((3, 16))}])
    with pytest.raises(BadInput, match=r"embed has shape \[3, 16\]"):
        export(run, tmp_path / "out")
    with pytest.raises(BadInput, match=r"is the model that the run started with"):
        export(run, run / START)
    with pytest.raises(BadInput, match=r"is the folder of a run: give another one, such as .*/model$"):
        export(run, run)
    with pytest.raises(BadInput, match="holds 00000001, which is no part of a model: name a new folder"):
        save_model(run / "checkpoints", model)
