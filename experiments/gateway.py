"""Serve a model by the OpenAI API, and record the requests of agents as trajectories.

    python -m experiments.gateway --model=PATH
    python -m experiments.gateway --model=PATH --record=sessions.jsonl --reward=math --turns=8
    python -m experiments.gateway --model=PATH --host=0.0.0.0 --token=SECRET

After `pip install '.[gateway]'`. PATH is a model folder with weights, tokenizer and chat template, or a hub id. Clients
use the URL that is printed: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, with
`return_token_ids` for the ids behind an answer.

A session records an agent's requests and completions as one trajectory, with the sampled ids and log-probabilities:
POST /sessions {"task": {"query": ..., "answers": [...]}} gives a base URL; POST /s/NAME/reward ends it, with
{"reward": 1.0}, or with {"output": ...}, which --reward judges. A session is sampled with --temperature, whatever its
requests ask for. POST /weights {"folder": ..., "version": 1} updates the weights without dropping a request.

It listens on this machine only, unless there is a token, which clients then send as their API key. Stop it by Ctrl-C.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from absl import flags

from flowgrpo import launch

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_MODEL = flags.DEFINE_string("model", None, "Model folder, GGUF file, smollm2, gemma3, or hub id.", required=True)
_NAME = flags.DEFINE_string("name", "planner", "Name of the model in requests.")
_REWARD = flags.DEFINE_string(
    "reward", "posted", "Who judges a session: posted, by its client; a domain, such as math; or MODULE:FUNCTION."
)
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen on; one that other machines can reach needs --token."
)
_PORT = flags.DEFINE_integer(
    "port", 8000, "Port to listen on; 0 for any that is free.", lower_bound=0, upper_bound=65535
)
_TOKEN = flags.DEFINE_string("token", None, "API key of clients; FLOWGRPO_TOKEN by default.")
_ADMIN_TOKEN = flags.DEFINE_string(
    "admin_token",
    None,
    "What POST /weights and the details of /health need; FLOWGRPO_ADMIN_TOKEN by default. Where only --token is "
    "set, nobody can have them.",
)
_ORIGINS = flags.DEFINE_list("origins", [], "Origins whose pages may send requests, such as http://localhost:3000.")
_HOSTS = flags.DEFINE_list("hosts", [], "Further host names that local clients may use.")
flag_heading("Sizes")
_TURNS = flags.DEFINE_integer("turns", 64, "Maximum number of requests of a session.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 512, "Maximum tokens of a completion.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context_tokens", 4096, "Maximum tokens of a context with its completion.", lower_bound=2
)
_SESSIONS = flags.DEFINE_integer("sessions", 1024, "Maximum number of open sessions.", lower_bound=1)
flag_heading("Sampling")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Sampling temperature of sessions.", lower_bound=0.01)
_SILENT = flags.DEFINE_float(
    "silent_seconds", 600.0, "Seconds without a request after which a session ends.", lower_bound=0.1
)
flag_heading("Devices and memory")
_SLOTS = flags.DEFINE_integer("slots", 16, "Number of requests that decode together.", lower_bound=2)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Type of the weights.")
flag_heading("Files and resuming")
_RECORD = flags.DEFINE_string("record", None, "File to which ended sessions are appended, one line each.")

app.read_flags(__name__)

from flowgrpo.contracts import Reward
from flowgrpo.files import make_folder
from flowgrpo.gateway.auth import AccessPolicy
from flowgrpo.gateway.server import Gateway
from flowgrpo.gateway.serving import ModelServer, ServerSettings
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.generate.sampler import MAX_TOP_K
from flowgrpo.models.hf import Model, load_model
from flowgrpo.recipes import registry
from flowgrpo.rollout.records import RecordedTrajectory, to_json
from flowgrpo.sandbox import Sandbox
from flowgrpo.training.language_model import default_min_decode_batch
from flowgrpo.types import BadInput, Task


def serving_engine(model: Model) -> Engine:
    """An engine over the model, for requests that cut the support and for those that don't."""
    return Engine(
        model.policy,
        model.params,
        EngineSettings(
            slots=_SLOTS.value,
            slot_length=_CONTEXT.value,
            banned=model.banned,
            max_recorded_top_k=MAX_TOP_K,
            mixed=True,
            min_decode_batch=default_min_decode_batch(),
        ),
        detokenize=model.tokenizer.decode,
    )


def judge(stack: ExitStack) -> Reward | None:
    """The reward that --reward names; None where clients post it."""
    named = _REWARD.value
    if named == "posted":
        return None
    if ":" in named:
        return registry.make_reward(named, Task("", "", ("",), ""))
    if named not in registry.DOMAINS:
        known = ", ".join(registry.DOMAINS)
        raise BadInput(f"--reward={named} must be posted, MODULE:FUNCTION, or a domain among {known}")
    sandbox = stack.enter_context(Sandbox(workers=launch.num_cores(), preload=registry.modules_to_preload([named])))
    return registry.route_by_domain(registry.RewardContext(sandbox=sandbox), default=named)


class Recorder:
    """The file of sessions that have ended, and how many there were."""

    def __init__(self, path: str | None):
        self._path = None if path is None else make_folder(Path(path).parent) / Path(path).name
        self._lock, self.count = threading.Lock(), 0

    def __call__(self, played: RecordedTrajectory) -> None:
        """Add a session."""
        with self._lock:
            self.count += 1
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(to_json(played) + "\n")
        how = f"{played.status.name}{f' ({played.reason})' if played.reason else ''}"
        print(f"session {self.count}: {len(played.turns)} turns, {how}, outcome {played.outcome}", file=sys.stderr)


@contextmanager
def open_gateway() -> Iterator[Gateway]:
    """The gateway that the flags describe."""
    if _CONTEXT.value <= _MAX_TOKENS.value:
        message = f"--context_tokens={_CONTEXT.value} must be greater than --max_tokens={_MAX_TOKENS.value}"
        raise BadInput(f"{message}, which it holds: every session would be over at once")
    tokens = {
        name: os.environ.get(f"FLOWGRPO_{name.upper()}") if flag.value is None else flag.value
        for name, flag in (("token", _TOKEN), ("admin_token", _ADMIN_TOKEN))
    }
    # Made here, so that bad values are refused before a model is loaded.
    access = AccessPolicy(_HOST.value, **tokens, origins=tuple(_ORIGINS.value), hosts=tuple(_HOSTS.value))
    with ExitStack() as stack:
        reward, recorder = judge(stack), Recorder(_RECORD.value)
        model = load_model(_MODEL.value, dtype=_DTYPE.value)
        engine = stack.enter_context(serving_engine(model))
        settings = ServerSettings(
            turns=_TURNS.value,
            max_tokens=_MAX_TOKENS.value,
            context_tokens=_CONTEXT.value,
            temperature=_TEMPERATURE.value,
            silent_seconds=_SILENT.value,
            max_sessions=_SESSIONS.value,
        )
        load = partial(load_model, dtype=_DTYPE.value)
        server = ModelServer(
            engine,
            model.tokenizer,
            model.policy,
            model.params,
            settings,
            reward=reward,
            on_session_end=recorder,
            load=load,
        )
        decode = model.tokenizer.decode
        del model  # or its weights would stay when others have taken their place
        gateway = Gateway(
            model=_NAME.value,
            decode=decode,
            complete=server.complete,
            open_session=server.open_session,
            update_weights=server.update_weights,
            access=access,
            port=_PORT.value,
        )
        yield stack.enter_context(gateway)


def main() -> None:
    """Serve until a signal comes."""
    stop = threading.Event()
    with open_gateway() as gateway:
        print(json.dumps({"url": gateway.url, "model": _NAME.value}), flush=True)
        print(f"serving {_MODEL.value} at {gateway.url}; Ctrl-C ends it", file=sys.stderr, flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()


if __name__ == "__main__":
    app.run(main, exact=True)
