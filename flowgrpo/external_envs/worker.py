"""A process that runs external environments; this file needs nothing but the standard library.

    PYTHON worker.py KIND SPEC

    trl          MODULE:CLASS, as for TRL's `environment_factory`: `reset`, public methods are tools, `get_reward`
    gymnasium    id of an environment, which may name its module: MODULE:ID
    textarena    id of an environment for one player
    openenv      URL of a server, ws://HOST:PORT/ws

Lines of JSON on standard input are calls ({"number", "episode", "ask", ...}), lines on standard output their answers,
each as soon as there is one. Every call runs in a thread of its own, so that an episode that hangs delays no other. The
process ends when its input does.
"""

import inspect
import json
import os
import re
import sys
import threading
import typing
from importlib import import_module
from urllib.request import urlopen

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
CONNECT_SECONDS = 60.0  # timeout for connecting to a server


def import_named(spec):
    """Import MODULE:NAME; the module may be in the current folder."""
    sys.path.insert(0, os.getcwd())
    module, _, name = spec.partition(":")
    return getattr(import_module(module), name)


class Trl:
    """A class whose public methods are tools."""

    def __init__(self, spec):
        self.env = import_named(spec)()
        members = inspect.getmembers(type(self.env), predicate=inspect.isfunction)
        names = [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]
        self.methods = {name: getattr(self.env, name) for name in names}

    def reset(self, seed, task):
        """Reset the environment -> its observation, and the schemas of the methods."""
        parameters = inspect.signature(self.env.reset).parameters
        arguments = {"seed": seed, **task}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        return {
            "said": self.env.reset(**arguments) or "",
            "tools": [method_schema(method) for method in self.methods.values()],
        }

    def call(self, name, arguments):
        """Call a method; an exception is an observation, as in TRL."""
        if name not in self.methods:
            return {"said": f"Error: there is no tool {name!r}", "error": True}
        try:
            return {"said": str(self.methods[name](**arguments))}
        except Exception as error:
            return {"said": f"Error: {type(error).__name__}: {error}", "error": True}

    def end(self):
        """Reward of the whole episode."""
        if hasattr(self.env, "get_reward"):
            return {"reward": self.env.get_reward()}
        return {"reward": getattr(self.env, "reward", None)}


def method_schema(method):
    """JSON schema of a method, from its type hints and the lines under "Args:" of its docstring."""
    docstring = inspect.getdoc(method) or ""
    arguments = docstring.partition("Args:")[2]
    descriptions = dict(re.findall(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", arguments, re.MULTILINE))
    hints = typing.get_type_hints(method)
    parameters = inspect.signature(method).parameters
    properties = {}
    for name in parameters:
        kind = hints.get(name, str)
        properties[name] = {"type": JSON_TYPES.get(typing.get_origin(kind) or kind, "string")}
        if name in descriptions:
            properties[name]["description"] = descriptions[name]
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": method.__name__, "description": docstring.split("\n")[0], "parameters": schema}
    return {"type": "function", "function": function}


class Gymnasium:
    """A gymnasium environment: observations become text, and the text of an action is parsed for the action space."""

    def __init__(self, spec):
        import gymnasium  # pyright: ignore[reportMissingImports]

        self.spaces, self.env = gymnasium.spaces, gymnasium.make(spec)

    def reset(self, seed, task):
        """The first observation."""
        observation, _ = self.env.reset(seed=seed, options=task or None)
        return {"said": to_text(observation)}

    def step(self, action):
        """Take an action; one that can't be parsed is answered with an error, and changes nothing."""
        try:
            parsed = self._parse(action)
        except (ValueError, TypeError) as error:
            return {"said": f"Error: {error}", "error": True}
        observation, reward, terminated, truncated, _ = self.env.step(parsed)
        return {"said": to_text(observation), "reward": float(reward), "done": bool(terminated or truncated)}

    def _parse(self, action):
        space, text = self.env.action_space, action.strip()
        if isinstance(space, self.spaces.Text):
            return text
        if isinstance(space, self.spaces.Discrete):
            numbers = re.findall(r"-?\d+", text)
            first, last = int(space.start), int(space.start + space.n - 1)
            if not numbers or not first <= int(numbers[-1]) <= last:
                raise ValueError(f"an action is a number from {first} to {last}")
            return int(numbers[-1])
        return space.from_jsonable([json.loads(text)])[0]


def to_text(observation):
    """An observation as text."""
    if isinstance(observation, str):
        return observation
    try:
        return json.dumps(observation)
    except TypeError:
        return str(observation.tolist() if hasattr(observation, "tolist") else observation)


class TextArena:
    """A textarena game for one player."""

    def __init__(self, spec):
        import textarena  # pyright: ignore[reportMissingImports]

        self.env = textarena.make(spec)

    def reset(self, seed, task):
        """The first observation."""
        self.env.reset(num_players=1, seed=seed)
        return {"said": self.env.get_observation()[1]}

    def step(self, action):
        """Take an action; the reward comes at the end."""
        done, _ = self.env.step(action=action)
        if not done:
            return {"said": self.env.get_observation()[1]}
        rewards, _ = self.env.close()
        return {"said": "", "reward": float(rewards.get(0, 0.0)), "done": True}


class OpenEnv:
    """An environment behind a server that speaks OpenEnv's protocol over a websocket, a connection for each episode."""

    def __init__(self, spec):
        from websockets.sync.client import connect  # pyright: ignore[reportMissingImports]

        self.connection, self.field = connect(spec, open_timeout=CONNECT_SECONDS), None
        self.schema = re.sub("^ws", "http", spec.rsplit("/", 1)[0]) + "/schema"

    def reset(self, seed, task):
        """The first observation."""
        return {"said": self._text(self._request("reset", {"seed": seed, **task}))}

    def step(self, action):
        """Take an action: JSON in the environment's own form, or the text of its one field."""
        try:
            fields = json.loads(action)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            fields = {self._text_field(): action.strip()}
        data = self._request("step", fields)
        reward = data.get("reward")
        answer = {"said": self._text(data), "done": bool(data.get("done"))}
        return answer | ({} if reward is None else {"reward": float(reward)})

    def _text_field(self):
        """Name of the action's text field, by the server's schema."""
        if self.field is None:
            with urlopen(self.schema, timeout=CONNECT_SECONDS) as response:
                schema = json.load(response)["action"]
            names = schema.get("required") or [name for name in schema.get("properties", {}) if name != "metadata"]
            self.field = names[0] if names else "message"
        return self.field

    def _request(self, kind, data):
        self.connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.connection.recv())
        if not isinstance(answer, dict) or answer.get("type") != "observation" or not isinstance(answer["data"], dict):
            raise RuntimeError(f"the server answered {json.dumps(answer)[:200]}")
        return answer["data"]

    def _text(self, data):
        """The observation as text: its only text field, or all fields as JSON."""
        observation = data.get("observation", {})
        if isinstance(observation, dict):
            fields = {name: value for name, value in observation.items() if name != "metadata"}
            texts = [value for value in fields.values() if isinstance(value, str)]
            return texts[0] if len(texts) == 1 else json.dumps(fields)
        return to_text(observation)

    def close(self):
        """Disconnect from the server."""
        self.connection.close()


ADAPTERS = {"trl": Trl, "gymnasium": Gymnasium, "textarena": TextArena, "openenv": OpenEnv}


class Episodes:
    """The episodes of this process."""

    def __init__(self, kind, spec, out):
        self.make = lambda: ADAPTERS[kind](spec)
        self.episodes, self.out, self.lock = {}, out, threading.Lock()

    def answer(self, line):
        """Run the call of a line, and write its answer."""
        message = json.loads(line)
        try:
            result = self.call(message["episode"], message["ask"], message.get("with", {}))
        except BaseException as error:
            result = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        with self.lock:
            self.out.write(json.dumps({"number": message["number"], **result}) + "\n")
            self.out.flush()

    def call(self, episode, method, arguments):
        """Call a method of an episode's environment."""
        if method == "reset":
            self.episodes[episode] = self.make()
        env = self.episodes.get(episode)
        if env is None:
            return {"gone": True}
        if method == "close":
            self.episodes.pop(episode, None)
            getattr(env, "close", lambda: None)()
            return {}
        return getattr(env, method)(**arguments)


def main():
    """Serve until the input ends, and then exit at once."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints must not mix with our lines
    worker = Episodes(sys.argv[1], sys.argv[2], out)
    for line in sys.stdin:
        threading.Thread(target=worker.answer, args=(line,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
