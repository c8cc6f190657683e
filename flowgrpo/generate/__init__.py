"""Generators turn requests into completions; all have `generate`, `submit` and `close`.

Modules:

    admission      Which waiting request enters which free slot of an engine
    cache_copy     Copies of cache rows, in place: the filled part of one becomes the prefix of another
    engine         Continuous batching: an `Engine` answers requests that come at any time, from any thread, by futures
    kv_slots       Slots of a KV cache: the content of each, and how a conversation is split into spans of fixed shape
    openai_client  A client of OpenAI-compatible servers, for frozen roles and judges
    openai_wire    Requests and responses of an OpenAI-compatible server as values, to and from bytes; pure
    prefill        Prefill of requests that enter together: a trie over slots, each piece of which is computed once
    remote_engine  An engine on a server: ids in, ids and log-probabilities out, over the OpenAI API
    requests       Settings of an engine, requests in flight, and where a stop string ends a completion
    sampler        Sample and score tokens with one forward function
"""

from flowgrpo.generate.engine import Engine
from flowgrpo.generate.openai_client import Remote, remote
from flowgrpo.generate.remote_engine import RemoteEngine
from flowgrpo.generate.requests import EngineSettings
from flowgrpo.generate.sampler import Sampling, logprobs
