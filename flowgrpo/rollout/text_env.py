"""Play a `TextEnv` in this process: `TextEnvRunner` answers the effects of its conversation with the model.

    runner = TextEnvRunner(Parcel)
    runner.check(tasks[0])                                                   # one sentence for what is wrong with it
    env = runner.host_env(tokenizer, max_tokens=64, context_tokens=1024)
    hosted(env, engine.submit, call_tool=runner.call_tool, reward=runner.reward)(tasks, keys, groups)

An instance plays one episode and is dropped at its end. Of episodes that nobody ended (a deadline did, or a kill) the
oldest are dropped; one that is called again is restored by its calls (`conversation_env`).
"""

import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from flowgrpo.contracts import Call, HostEnv, Result, Reward, Tool
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.envs.text import Done, RewardFunction, SingleTurn, TextEnv, to_reward
from flowgrpo.files import describe_error
from flowgrpo.rollout.conversation_env import conversation_env, task_fields
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import Toolset, toolset
from flowgrpo.types import JSON, BadInput, Task, check_range

MAX_EPISODES = 4096  # under way, or left behind


class EpisodeFailure(Exception):
    """An episode can't go on, through no fault of the policy; the message is the reason."""


class Episode(NamedTuple):
    """An instance, and its tools that are bound to it."""

    env: TextEnv
    tools: Toolset
    bound: frozenset[str]  # their names


class TextEnvRunner:
    """The episodes of a `TextEnv` in this process; thread-safe."""

    def __init__(
        self,
        env: type[TextEnv],
        *,
        reward: Reward | RewardFunction | None = None,
        tool_seconds: float = 10.0,
        max_episodes: int = MAX_EPISODES,
    ):
        """Check the class; nothing of it is called yet.

        Args:
            env: the class.
            reward: of the run; None: that of the class.
            tool_seconds: timeout of a tool call.
            max_episodes: number of instances that are kept.
        """
        check_text_env(env)
        self.env, self.name, self.max_episodes = env, env.__name__, max_episodes
        self.reward = to_reward(reward) if reward is not None else to_reward(env.reward, f"{self.name}.reward")
        self._make_toolset = partial(toolset, timeout=tool_seconds)
        self.schemas = self._make_toolset([to_tool(item, self.name) for item in env.tools]).schemas
        self._shared = self._make_toolset([to_tool(item, self.name) for item in env.tools if not takes_self(item)])
        self._bound = [item for item in env.tools if takes_self(item)]
        self._episodes: OrderedDict[tuple[int, ...], Episode] = OrderedDict()
        self._lock = threading.Lock()

    def host_env(
        self,
        tokenizer: ChatTokenizer,
        *,
        max_tokens: int,
        context_tokens: int,
        turns: int | None = None,
        instructions: str = "",
    ) -> HostEnv:
        """The environment as a conversation, whose effects `call_tool` runs.

        Args:
            tokenizer: with the chat template.
            max_tokens: of an action, unless the class has its own.
            context_tokens: of a conversation with all its actions.
            turns: maximal number of actions; None: `max_turns` of the class.
            instructions: text before the first observation; "": that of the class.
        """
        return conversation_env(
            tokenizer,
            turns=self.env.max_turns if turns is None else turns,
            max_tokens=self.env.max_tokens or max_tokens,
            context_tokens=context_tokens,
            instructions=instructions or self.env.instructions,
            tools=[schema["name"] for schema in self.schemas],
            schemas=self.schemas,
            name=self.name,
            is_text_env=True,
        )

    def call_tool(self, call: Call) -> Result:
        """Run an effect of kind "env": a call of an episode's instance, or all its calls again."""
        if call.kind != "env":
            raise BadInput(f"{self.name} was asked for the {call.kind} {call.name!r}: give it calls of kind 'env' only")
        with self._lock:
            episode = self._episodes.pop(call.seed, None)
        result: Mapping[str, JSON] = {}
        for env_call in call.arguments.get("again", [call.arguments]):
            try:
                episode, result = self._answer(episode, env_call["ask"], env_call.get("with", {}))
            except EpisodeFailure as failure:
                return Result("", failure=str(failure))
        if episode is not None:
            with self._lock:
                self._episodes[call.seed] = episode
                while len(self._episodes) > self.max_episodes:
                    self._episodes.popitem(last=False)
        return Result(json.dumps(result))

    def check(self, task: Task) -> None:
        """Play the start of an episode and one empty action; raises `BadInput` for what no episode could do."""
        fields = task_fields(task)
        try:
            json.dumps(fields)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"task {task.id!r} has a field that is no JSON ({error}): give strings, numbers, lists"
            ) from None
        try:
            episode, observation = self._begin(fields)
        except EpisodeFailure as failure:
            names = ", ".join(fields)
            raise BadInput(f"{failure}; it was called with task {task.id!r}, which has the fields {names}") from None
        if not (observation.strip() or self.env.instructions):
            raise BadInput(
                f"{self.name}.reset returned an empty text for task {task.id!r}: return what the model is told"
            )
        try:
            self._step(episode.env, "")
        except EpisodeFailure as failure:
            raise BadInput(f"{failure}; it was called with an empty action, and a model may write anything") from None

    def check_prompt(self, env: HostEnv, task: Task) -> None:
        """Render the first observation of a task; raises `BadInput` if it leaves no room for an action."""
        key = jax.random.key(0)
        state, _ = env.reset(key, task, self.call_tool)
        with self._lock:
            self._episodes.pop(state.seed, None)

    @property
    def needs_reward(self) -> bool:
        """Whether every episode ends without a reward, and the class has none."""
        return issubclass(self.env, SingleTurn) and self.reward is None

    # Episodes -----------------------------------------------------------------------------------------

    def _answer(
        self, episode: Episode | None, ask: str, arguments: Mapping[str, JSON]
    ) -> tuple[Episode | None, Mapping[str, JSON]]:
        """Call an episode's instance -> (the episode, None if it is over; the result)."""
        if ask == "reset":
            episode, said = self._begin(arguments["task"])
            return episode, {"said": said}
        if ask == "end":
            return None, {}
        if episode is None:
            return None, {"gone": True}
        if ask == "call":
            return episode, self._call(episode, arguments["name"], arguments["arguments"])
        result = self._step(episode.env, arguments["action"])
        return (None if result.get("done") else episode), result

    def _begin(self, fields: Mapping[str, JSON]) -> tuple[Episode, str]:
        """A new instance, and what its `reset` returns."""
        env: TextEnv = self._run("__init__", self.env)
        copy = json.loads(json.dumps(dict(fields)))  # so that no episode changes the task of another (A3)
        env.task = MappingProxyType(copy)
        identity = json.dumps([copy.get("id"), copy.get("seed", 0)]).encode()
        env.rng = np.random.default_rng(int.from_bytes(blake2b(identity, digest_size=16).digest()))
        tools = [to_tool(item, self.name, env) for item in self._bound]
        said = self._run("reset", env.reset, env.task)
        if not isinstance(said, str):
            raise EpisodeFailure(f"{self.name}.reset returned {said!r:.80}: return a string")
        return Episode(env, self._make_toolset(tools), frozenset(item.name for item in tools)), said

    def _step(self, env: TextEnv, action: str) -> Mapping[str, JSON]:
        """What `step` returns, as JSON."""
        value = self._run("step", env.step, action)
        if isinstance(value, str):
            return {"said": value}
        if not isinstance(value, Done):
            raise EpisodeFailure(f"{self.name}.step returned {value!r:.80}: return a string or fg.Done(reward)")
        if value.reward is None and self.reward is None:
            raise EpisodeFailure(
                f"{self.name}.step returned Done without a reward, and there is no reward= to judge the output"
            )
        values = {"reward": value.reward, "output": value.output, "correct": value.correct, "reason": value.message}
        return {"done": True} | {name: item for name, item in values.items() if item is not None}

    def _call(self, episode: Episode, name: str, arguments: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """The result of a tool."""
        tools = episode.tools if name in episode.bound else self._shared
        if name not in episode.bound and name not in {item.name for item in self._shared.tools}:
            names = ", ".join(schema["name"] for schema in self.schemas)
            return {"said": f"There is no tool {name!r:.200}. The tools are: {names}.", "error": True}
        result = tools.call_tool(Call("tool", name, arguments))
        if result.failure:
            raise EpisodeFailure(result.failure)
        return {"said": result.text, "error": result.error}

    def _run(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call code of the class; an exception is a failure of the infrastructure."""
        try:
            return function(*arguments)
        except BadInput as error:
            raise EpisodeFailure(f"{self.name}.{method}: {error}") from error
        except (Exception, SystemExit) as error:
            raise EpisodeFailure(f"{self.name}.{method} raised {describe_error(error)}") from error


# Checks of a class ------------------------------------------------------------------------------------


def check_text_env(env: Any) -> type[TextEnv]:
    """This subclass of `TextEnv`; raises `BadInput` for anything else, and unless it is complete."""
    if isinstance(env, TextEnv):
        raise BadInput(
            f"{type(env).__name__}() is an instance: give the class itself, which makes one for each episode"
        )
    if not (isinstance(env, type) and issubclass(env, TextEnv)):
        raise BadInput(f"{env!r:.80} is no subclass of fg.TextEnv: derive a class from it, with a step")
    name = env.__name__
    if env.step is TextEnv.step:
        raise BadInput(f"{name} has no step: write step(self, action), which returns a string or fg.Done(reward)")
    for method, arguments in (("reset", "(self, task)"), ("step", "(self, action)")):
        function = getattr(env, method)
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise BadInput(f"{name}.{method} must be a method {arguments} that is no coroutine, not {function!r:.80}")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError:
            raise BadInput(f"{name}.{method} takes {inspect.signature(function)}, but must take {arguments}") from None
    check_range(name, "max_turns", env.max_turns, 1, whole=True)
    check_range(name, "max_tokens", env.max_tokens, 1, whole=True, optional=True)
    if not isinstance(env.instructions, str):
        raise BadInput(f"{name}.instructions is {env.instructions!r:.80}, but must be a string")
    if isinstance(env.tools, str | Mapping) or not isinstance(env.tools, Sequence):
        raise BadInput(f"{name}.tools is {env.tools!r:.80}, but must be a list of functions or fg.contracts.Tool")
    return env


def takes_self(item: Any) -> bool:
    """Whether an item of `tools` is a function of the class, which is called with the instance."""
    return inspect.isfunction(item) and next(iter(inspect.signature(item).parameters), "") == "self"


def to_tool(item: Any, owner: str, instance: TextEnv | None = None) -> Tool:
    """The tool that an item of `tools` is, bound to the instance if it takes one."""
    if isinstance(item, Tool):
        return item
    if isinstance(item, type) or not callable(item):
        raise BadInput(
            f"{owner}.tools has {item!r:.80}: give functions with types and a docstring, or fg.contracts.Tool"
        )
    return tool(partial(item, self=instance) if takes_self(item) else item)
