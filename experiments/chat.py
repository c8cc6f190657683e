"""Talk to a checkpoint in the terminal; the answer appears as it is sampled.

    python -m experiments.chat --model=PATH
    python -m experiments.chat --model=PATH --top_k=1 --system="Answer in one word."
    echo "Who are you?" | python -m experiments.chat --model=PATH

PATH is a model folder with weights, tokenizer and chat template, a GGUF file, smollm2, gemma3, or a hub id. `/reset`
starts a new conversation, `/quit` or the end of the input ends the program, Ctrl-C stops an answer. Each line is a
message; from a pipe, only the answers are printed. Equal seeds and messages give equal answers.

Runs anywhere: a model of a billion parameters needs 4 GB in float32. The first answer takes a few seconds of
compilation; later ones start at once, since the cache of the conversation is kept.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from absl import flags

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_MODEL = flags.DEFINE_string("model", None, "Model folder, GGUF file, smollm2, gemma3, or hub id.")
_SYSTEM = flags.DEFINE_string("system", None, "System message; none by default.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of sampling.")
flag_heading("Sizes")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 512, "Maximum tokens of an answer.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 4096, "Maximum tokens of a conversation.", lower_bound=2)
flag_heading("Sampling")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Sampling temperature; greedy is --top_k=1.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k most probable tokens; 0: all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the smallest set of tokens with this probability.")
flag_heading("Devices and memory")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Type of the weights.")

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.data.tokenizer import ChatTokenizer, Conversation, add_action, add_messages, start_conversation
from flowgrpo.generate.sampler import MAX_TOP_K, Sampling, decode, make_sampling, prefill, start_rows
from flowgrpo.models.hf import Model, load_model
from flowgrpo.training.signals import Terminated
from flowgrpo.types import BadInput

CHUNK, STEPS = 64, 4  # tokens per prefill, and tokens decoded between two prints
UNFINISHED = "\ufffd"  # decoded from an incomplete character
# Text of a model must not control the terminal: only line feed and tab are kept of the control characters.
CONTROLS = {code: UNFINISHED for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


class Speaker:
    """A model with the cache of one conversation, which only grows, so that the cache stays valid."""

    def __init__(self, model: Model, settings: Sampling, *, width: int, context: int):
        """`width` is the size of the recorded top-k support; 0 if all tokens can be sampled."""
        text: ChatTokenizer = model.tokenizer
        assert model.policy.make_cache is not None
        self.text, self.context = text, context
        self._params, self._settings = model.params, settings
        self._make_cache = partial(model.policy.make_cache, 1, context)
        self._prefill = jax.jit(partial(prefill, model.policy), donate_argnums=1)
        options = {"steps": STEPS, "banned": model.banned, "width": width}
        self._decode = jax.jit(partial(decode, model.policy, **options), donate_argnums=1)
        self.forget()

    def forget(self) -> None:
        """Empty the cache."""
        self._cache, self._num_cached = self._make_cache(), 0

    def answer(self, conversation: Conversation, key: jax.Array, max_tokens: int) -> Iterator[list[int]]:
        """The ids of an answer as they are sampled, a few at a time, ending with a stop id or the budget."""
        budget = min(max_tokens, self.context - len(conversation.tokens))
        self._feed(conversation.tokens[self._num_cached : -1])
        last, most = (jnp.array([value], jnp.int32) for value in (conversation.tokens[-1], budget))
        rows = start_rows(self._cache, last, key[None], most)
        stop_ids = np.array([self.text.stop_ids], np.int32)
        while bool(rows.active[0]):
            rows, sampled = self._decode(self._params, rows, self._settings, stop_ids)
            self._cache, live = rows.cache, np.asarray(sampled.live[:, 0])
            self._num_cached += int(live.sum())
            yield np.asarray(sampled.token)[live, 0].tolist()

    def _feed(self, tokens: tuple[int, ...]) -> None:
        """Prefill these tokens."""
        for i in range(0, len(tokens), CHUNK):
            part = np.zeros((1, CHUNK), np.int32)
            part[0, : len(tokens[i : i + CHUNK])] = tokens[i : i + CHUNK]
            real = np.arange(CHUNK)[None] < len(tokens) - i
            self._cache = self._prefill(self._params, self._cache, part, real)
        self._num_cached += len(tokens)


def _printable(text: ChatTokenizer, ids: list[int]) -> str:
    """The printable text of an answer, without its stop token and without an incomplete character."""
    words = ids[:-1] if ids and ids[-1] in text.stop_ids else ids
    return text.decode(words).translate(CONTROLS).rstrip(UNFINISHED)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed in the block, as a function; nothing is raised there."""
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def speak(speaker: Speaker, conversation: Conversation, key: jax.Array, max_tokens: int) -> list[int]:
    """Print an answer while it is sampled; returns its ids, fewer if Ctrl-C stopped it."""
    ids, printed = [], 0
    with _interrupts() as pressed:
        for new_ids in speaker.answer(conversation, key, max_tokens):
            ids += new_ids
            words = _printable(speaker.text, ids)
            print(words[printed:], end="", flush=True)
            printed = max(printed, len(words))
            if pressed():
                break
    print(flush=True)
    return ids


def _messages(is_terminal: bool) -> Iterator[str]:
    """Input lines up to `/quit` or the end; the prompt is printed only in a terminal."""
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            print(end="\n" if is_terminal else "")
            return
        except KeyboardInterrupt as stop:
            if not is_terminal or isinstance(stop, Terminated):
                raise
            print("\n(/quit ends)")
            continue
        if line == "/quit":
            return
        if line:
            yield line


def _chat(speaker: Speaker, opening: list[dict[str, str]], is_terminal: bool) -> None:
    """Answer message by message, until the input ends."""
    conversation, answers, key = None, 0, jax.random.key(_SEED.value)
    for line in _messages(is_terminal):
        if line == "/reset":
            conversation = None
            speaker.forget()
            continue
        message = {"role": "user", "content": line}
        if conversation is None:
            longer = start_conversation(speaker.text, [*opening, message])
        else:
            longer = add_messages(speaker.text, conversation, [message])
        if len(longer.tokens) >= speaker.context:
            full = f"the conversation is full at {speaker.context} tokens: /reset, or raise --context"
            print(f"{app.command_name()}: {full}", file=sys.stderr, flush=True)
            continue
        ids = speak(speaker, longer, jax.random.fold_in(key, answers), _MAX_TOKENS.value)
        conversation, answers = add_action(longer, ids), answers + 1


def _open_speaker(opening: list[dict[str, str]]) -> Speaker:
    """Load the model of the flags, and check that its template can render the first messages."""
    if not _MODEL.value:
        raise BadInput("--model is missing: give a model folder, or a hub id")
    if not _TEMPERATURE.value > 0:
        raise BadInput(f"--temperature={_TEMPERATURE.value} must be greater than 0; greedy is --top_k=1")
    if not 0 <= _TOP_K.value <= MAX_TOP_K:
        raise BadInput(f"--top_k={_TOP_K.value} must be from 1 to {MAX_TOP_K}, or 0 for no cut")
    if not 0 < _TOP_P.value <= 1:
        raise BadInput(f"--top_p={_TOP_P.value} must be greater than 0 and at most 1")
    model = load_model(str(_MODEL.value), dtype=_DTYPE.value)
    start_conversation(model.tokenizer, [*opening, {"role": "user", "content": "x"}])
    top_k = _TOP_K.value or MAX_TOP_K
    settings = make_sampling(1, temperature=_TEMPERATURE.value, top_k=top_k, top_p=_TOP_P.value)
    width = min(top_k, model.config.v) if _TOP_K.value > 0 or _TOP_P.value < 1 else 0
    return Speaker(model, settings, width=width, context=_CONTEXT.value)


def main() -> None:
    """Load the model and chat."""
    opening: list[dict[str, str]] = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    _chat(_open_speaker(opening), opening, is_terminal=sys.stdin.isatty())


if __name__ == "__main__":
    app.run(main)
