"""Generators, which turn requests into completions; all have `generate`, `submit` and `close`.

Modules:

    admission      Which waiting request enters which free slot of an engine
    cache_copy     Rows of a cache that begin as others do: the filled part of one is copied to another, in place
    engine         Continuous batching: an `Engine` answers requests that come at any time, from any thread, by futures
    kv_slots       Slots of a cache: what each holds, and how a conversation enters one in pieces of fixed shape
    openai_client  A client of OpenAI-compatible servers, behind which frozen roles and judges live
    openai_wire    Requests and answers of an OpenAI-compatible server as values, to and from bytes; pure
    prefill        Slots filled for requests that enter together: a trie over slots, whose every piece is computed once
    remote_engine  An engine elsewhere: ids in, ids and log-probabilities out, over an OpenAI-compatible server
    requests       Requests under way in an engine, and where a stop string ends a completion
    sampler        Sample and score tokens with one forward function
"""

from flowgrpo.generate.engine import Engine
from flowgrpo.generate.openai_client import Remote, remote
from flowgrpo.generate.remote_engine import RemoteEngine
from flowgrpo.generate.sampler import Sampling, logprobs
