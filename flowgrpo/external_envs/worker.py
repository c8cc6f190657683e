"""Keep environments of somebody else's in a process of their own; this file needs nothing but the standard library.

    PYTHON worker.py KIND SPEC

    trl          MODULE:CLASS, as TRL's `environment_factory` takes it: `reset`, public methods are tools, `get_reward`
    gymnasium    the id of an environment, which may name its module: MODULE:ID
    textarena    the id of an environment for one player
    openenv      the URL of a server, ws://HOST:PORT/ws

Lines of JSON on standard input ask for something ({"number", "episode", "ask", ...}), lines on standard output say what
came of it, each as soon as it is there. Episodes run side by side, a thread for each call, so that one that hangs keeps
no other waiting. The process ends with its input.
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

KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
OPENING = 60.0  # seconds in which a server has to take a connection


def named_thing(name):
    """Import what MODULE:NAME names; the module may lie in the current folder."""
    sys.path.insert(0, os.getcwd())
    module, _, own = name.partition(":")
    return getattr(import_module(module), own)


class Trl:
    """A class whose public methods are tools."""

    def __init__(self, spec):
        self.env = named_thing(spec)()
        members = inspect.getmembers(type(self.env), predicate=inspect.isfunction)
        named = [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]
        self.methods = {name: getattr(self.env, name) for name in named}

    def reset(self, seed, task):
        """Reset it; return what it says, and the schemas of the methods."""
        own = inspect.signature(self.env.reset).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in own.values())
        given = {"seed": seed, **task} if takes_all else {k: v for k, v in {"seed": seed, **task}.items() if k in own}
        return {
            "said": self.env.reset(**given) or "",
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
        """The reward of the whole episode."""
        if hasattr(self.env, "get_reward"):
            return {"reward": self.env.get_reward()}
        return {"reward": getattr(self.env, "reward", None)}


def method_schema(method):
    """Derive the schema of a method: from its types, and the lines under "Args:" of its docstring."""
    words = inspect.getdoc(method) or ""
    about = dict(re.findall(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", words.partition("Args:")[2], re.MULTILINE))
    hints = typing.get_type_hints(method)
    parameters = inspect.signature(method).parameters
    properties = {}
    for name in parameters:
        kind = hints.get(name, str)
        properties[name] = {"type": KINDS.get(typing.get_origin(kind) or kind, "string")}
        if name in about:
            properties[name]["description"] = about[name]
    required = [name for name, one in parameters.items() if one.default is one.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    name = method.__name__
    return {"type": "function", "function": {"name": name, "description": words.split("\n")[0], "parameters": schema}}


class Gymnasium:
    """An environment of gymnasium; what it shows is written out, and an action is read as its space wants it."""

    def __init__(self, spec):
        import gymnasium  # pyright: ignore[reportMissingImports]

        self.spaces, self.env = gymnasium.spaces, gymnasium.make(spec)

    def reset(self, seed, task):
        """The first observation."""
        shown, _ = self.env.reset(seed=seed, options=task or None)
        return {"said": written_out(shown)}

    def step(self, action):
        """Take an action; one that can't be read is answered with an error, and changes nothing."""
        try:
            read = self._read(action)
        except (ValueError, TypeError) as error:
            return {"said": f"Error: {error}", "error": True}
        shown, reward, terminated, truncated, _ = self.env.step(read)
        return {"said": written_out(shown), "reward": float(reward), "done": bool(terminated or truncated)}

    def _read(self, action):
        space, words = self.env.action_space, action.strip()
        if isinstance(space, self.spaces.Text):
            return words
        if isinstance(space, self.spaces.Discrete):
            numbers = re.findall(r"-?\d+", words)
            first, last = int(space.start), int(space.start + space.n - 1)
            if not numbers or not first <= int(numbers[-1]) <= last:
                raise ValueError(f"an action is a number from {first} to {last}")
            return int(numbers[-1])
        return space.from_jsonable([json.loads(words)])[0]


def written_out(shown):
    """Write an observation as text."""
    if isinstance(shown, str):
        return shown
    try:
        return json.dumps(shown)
    except TypeError:
        return str(shown.tolist() if hasattr(shown, "tolist") else shown)


class TextArena:
    """A game of textarena for one player."""

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

        self.link, self.field = connect(spec, open_timeout=OPENING), None
        self.schema = re.sub("^ws", "http", spec.rsplit("/", 1)[0]) + "/schema"

    def reset(self, seed, task):
        """The first observation."""
        return {"said": self._said(self._ask("reset", {"seed": seed, **task}))}

    def step(self, action):
        """Take an action: JSON of the environment's own, or the text of its one field."""
        try:
            given = json.loads(action)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            given = {self._field(): action.strip()}
        found = self._ask("step", given)
        reward = found.get("reward")
        said = {"said": self._said(found), "done": bool(found.get("done"))}
        return said | ({} if reward is None else {"reward": float(reward)})

    def _field(self):
        """The name of the action's field of text, by the server's schema."""
        if self.field is None:
            with urlopen(self.schema, timeout=OPENING) as answer:
                schema = json.load(answer)["action"]
            own = schema.get("required") or [name for name in schema.get("properties", {}) if name != "metadata"]
            self.field = own[0] if own else "message"
        return self.field

    def _ask(self, kind, data):
        self.link.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.link.recv())
        if not isinstance(answer, dict) or answer.get("type") != "observation" or not isinstance(answer["data"], dict):
            raise RuntimeError(f"the server answered {json.dumps(answer)[:200]}")
        return answer["data"]

    def _said(self, found):
        shown = found.get("observation", {})
        if isinstance(shown, dict):
            words = [value for name, value in shown.items() if isinstance(value, str) and name != "metadata"]
            return words[0] if len(words) == 1 else json.dumps({k: v for k, v in shown.items() if k != "metadata"})
        return written_out(shown)

    def close(self):
        """Leave the server."""
        self.link.close()


MAKERS = {"trl": Trl, "gymnasium": Gymnasium, "textarena": TextArena, "openenv": OpenEnv}


class Episodes:
    """The episodes of a process."""

    def __init__(self, kind, spec, out):
        self.make = lambda: MAKERS[kind](spec)
        self.episodes, self.out, self.lock = {}, out, threading.Lock()

    def answer(self, line):
        """Do what a line asks for, and say what came of it."""
        asked = json.loads(line)
        try:
            said = self.do(asked["episode"], asked["ask"], asked.get("with", {}))
        except BaseException as error:
            said = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        with self.lock:
            self.out.write(json.dumps({"number": asked["number"], **said}) + "\n")
            self.out.flush()

    def do(self, episode, ask, given):
        """One call of an episode's environment."""
        if ask == "reset":
            self.episodes[episode] = self.make()
        env = self.episodes.get(episode)
        if env is None:
            return {"gone": True}
        if ask == "close":
            self.episodes.pop(episode, None)
            getattr(env, "close", lambda: None)()
            return {}
        return getattr(env, ask)(**given)


def main():
    """Serve until the input ends, and then leave at once."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is no answer of ours
    worker = Episodes(sys.argv[1], sys.argv[2], out)
    for line in sys.stdin:
        threading.Thread(target=worker.answer, args=(line,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
