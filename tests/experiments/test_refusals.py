"""Every command starts and knows its flags; what it can't do is one sentence and a status."""

import ast
import json
import re
import shlex
import shutil
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from commands import ROOT, imported_modules

from experiments.cli.listing import commands
from flowgrpo.recipes import self_verify, self_verify_tasks
from flowgrpo.recipes.offline_start import write_model
from flowgrpo.recipes.recipe import find_config, recipe_names
from flowgrpo.training.config import setting_infos
from tests.experiments.conftest import EXPERIMENTS, check_refused

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("folder", ["", "benchmarks/"])
def test_every_command_has_a_page_of_help(command, folder):
    for name in commands(EXPERIMENTS / folder):
        page = command(f"{folder}{name}".replace("/", "."), "--help").stdout
        assert "\n\nEvery command:\n  --compilation_cache=TEXT\n" in page, name


OWN = """
import flowgrpo as fg

NUMBER = 3

def untyped(city):
    "Says what the weather is."

def number(task, answer):
    return 1.0

def broken(task, answer):
    return task.nothing
"""
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with files of all kinds, good and bad, in which nothing may change."""
    folder = tmp_path_factory.mktemp("world")
    for domain in ("answer", "chemistry"):
        tasks = [{"id": str(n), "query": "1+1?", "answers": ["2"], "domain": domain} for n in range(9)]
        (folder / f"{domain}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "few.jsonl").write_text((folder / "answer.jsonl").read_text().splitlines()[0])
    (folder / "other.jsonl").write_text('{"id": "1", "problem": "1+1?", "answers": ["2"], "domain": "answer"}\n')
    (folder / "broken.jsonl").write_text('{"id": "1", "query"\n')
    (folder / "empty.jsonl").touch()
    (folder / "own.py").write_text(OWN)
    write_model(folder / "model", ["one two"] * 3, seed=0, shape=SHAPE, vocab_size=300)
    shutil.copytree(folder / "model", folder / "mute")
    (folder / "mute" / "chat_template.jinja").unlink()
    shutil.copytree(folder / "model", folder / "gutted")
    (folder / "gutted" / "model.safetensors").write_bytes(b"")
    run = {"recipe": self_verify.NAME, "settings": self_verify_tasks.preset().to_json(), "machine": {}}
    for name, kept in (("spoiled", "{}"), ("old", '{"settings": {}, "machine": {}}'), ("run", json.dumps(run))):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(kept)
    (folder / "run" / ".lock").touch()  # as every run has one
    (folder / "run" / "metrics.jsonl").write_text('{"phase": "train", "update": 1}\n')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Read all that lies in a folder, but for what Python compiles."""
    every = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in every}


GIVEN = "--model=model --tasks=answer.jsonl"
BAD_INPUT = [
    ("agentflow", "--tools=calculator,browser", "'browser' is none of calculator, python, search, nor MODULE:FUNCTION"),
    ("agentflow", "--tools=nowhere:weather", "tool 'nowhere:weather' can't be imported: No module named 'nowhere'"),
    ("agentflow", "--tools=own:weather", "can't be imported: module 'own' has no attribute 'weather'"),
    ("agentflow", "--tools=own:untyped", "argument 'city' has no type; annotate it"),
    ("agentflow", "--tools=own:NUMBER", "tool 'own:NUMBER' is 3: name a function with types and a docstring"),
    ("agentflow", "--reward=own:number", "came to 1.0 for task"),
    ("agentflow", "--reward=own:broken", "name a function (task, answer) that returns fg.RewardResult(value)"),
    ("agentflow", "--reward=own", "reward 'own' names a module and nothing in it: write MODULE:NAME"),
    ("agentflow", "--domains=chess", "'chess' has no offline tasks"),
    ("agentflow", "--tasks=nowhere.jsonl", "nowhere.jsonl is no file; give the path of a task file"),
    ("agentflow", "--tasks=broken.jsonl", "line 1: isn't JSON"),
    ("agentflow", "--tasks=empty.jsonl", "empty.jsonl holds no task"),
    ("agentflow", "--tasks=few.jsonl", "few.jsonl has no task for"),
    ("agentflow", "--tasks=other.jsonl", "field 'query' is missing"),
    ("agentflow", "--tasks=other.jsonl --fields=query", "--fields=query must be NAME=FIELD"),
    ("agentflow", "--model=/nowhere --tasks=answer.jsonl", "model folder /nowhere does not exist; give a folder"),
    ("agentflow", "--model=mute --tasks=answer.jsonl", "mute has no chat template: put a chat_template.jinja there"),
    ("agentflow", "--model=gutted --tasks=answer.jsonl", "model.safetensors can't be read as safetensors"),
    ("agentflow", "--model=model", "--model needs --tasks: a .jsonl or .parquet file"),
    ("agentflow", "--actions=calls --rendering=fresh", "a conversation of calls and answers: give --rendering=append"),
    ("agentflow", "--warm_start=own", "--warm_start=own needs --model: the small model here imitates a script"),
    (
        "agentflow",
        "--model=model --tasks=word_problems --examples=none.jsonl --workdir=run --noresume",
        "none.jsonl is no file; give the path of a task file",
    ),
    ("agentflow", GIVEN, "the tool search needs --corpus"),
    ("agentflow", "--model=model --tasks=chemistry.jsonl", "tasks of the domain 'chemistry' have no reward"),
    ("agentflow", f"{GIVEN} --domain=chess", "--domain=chess has no reward; choose from answer, "),
    ("agentflow", "--corpus=nowhere.txt", "nowhere.txt: there is no such file or folder"),
    ("agentflow", "--mcp=no-such-command-anywhere", "no-such-command-anywhere"),
    ("agentflow", "--mcp=python\\ -c\\ 0", "fix the command or the URL, or start the server"),
    ("agentflow", "--mcp=http://127.0.0.1:9/mcp", "fix the command or the URL, or start the server"),
    ("agentflow", "--executor=http://127.0.0.1:9/v1#m", "does not answer"),
    ("agentflow", "--executor=loud", "--executor=loud must be model, rule, or a server and its model, as URL#MODEL"),
    ("agentflow", "--verifier=http://127.0.0.1:9/v1", "or a server and its model, as URL#MODEL"),
    ("agentflow", "--analyst=rule", "--analyst=rule must be model, none, or a server and its model, as URL#MODEL"),
    ("agentflow", "--prompts=curriculum", "--prompts=curriculum needs --difficulty"),
    ("agentflow", "--prompts=curriculum --difficulty=level", "field 'level' is missing"),
    ("agentflow", "--difficulty=level", "--difficulty=level needs --prompts=curriculum"),
    ("agentflow", "--max_tokens=300", "--max_tokens=300 leaves no room for a context within --context_tokens=256"),
    ("agentflow", "--algorithm=ppo", "--algorithm=ppo needs a critic, which this run has none of: take another"),
    ("agentflow", "--algorithm=opd", "--algorithm=opd needs a teacher, which this run has none of: take another"),
    ("quickstart", "--algorithm=opd", "--algorithm=opd and --teacher=RUN go together: give both, or neither"),
    ("quickstart", "--algorithm=opd --teacher=nowhere", "nowhere holds no run"),
    ("agentflow", "--lora_rank=4", "--lora_rank needs --model"),
    ("agentflow", "--base_dtype=int8", "--base_dtype=int8 freezes the weights: give --lora_rank=16 too"),
    ("agentflow", "--mesh=data=3", "data=3"),
    ("agentflow", "--offload=host --mesh=data=1", "leave out --mesh, or --offload"),
    ("agentflow", "--loggers=tensorbord", "--loggers=tensorbord is unknown; choose from tensorboard, wandb, trackio"),
    ("agentflow", "--workdir=run", "choose another folder"),
    (
        "agentflow",
        "--stop_after=8:50",
        "--stop_after=8:50 is no length of time: write hours, minutes and seconds, such",
    ),
    (
        "agentflow",
        "--workdir=spoiled",
        "spoiled/run.json is no record of a run, since it has no 'settings': restore it",
    ),
    ("agentflow", "--workdir=run --noresume --tools=browser", "'browser' is none of"),
    (
        "agentflow",
        "--workdir=model --noresume",
        "model holds no run that could be started again: choose another folder",
    ),
    ("agentflow", "--dry_run=compile --model=nowhere", "--model=nowhere is neither a folder with a config.json nor"),
    ("agentflow", "--dry_run=compile --model=model --device_memory=80", "--device_memory=80 must be a number above 0"),
    ("self_verify", "--model=nowhere", "model folder nowhere does not exist"),
    ("self_verify", "--model=mute --tasks=answer.jsonl", "put a chat_template.jinja there"),
    ("self_verify", "--tasks=answer.jsonl", "--tasks needs --model"),
    ("self_verify", "--max_tokens=32", "--max_tokens=32 leaves no room for a context within --context_tokens=32"),
    ("self_verify", "--temperature=0", "--temperature=0.0 always samples the same answer"),
    ("self_verify", "--lora_rank=4", "--lora_rank needs --model"),
    ("self_verify", "--model=mute --tasks=answer.jsonl --workdir=run --noresume", "put a chat_template.jinja there"),
    ("quickstart", "--workdir=own.py/run --updates=4", "can't be made"),
    ("quickstart", "--env=chess", "'chess' is unknown; choose from lookup, arithmetic, maze, lookup_hard,"),
    ("quickstart", "--env=nowhere:env", "environment 'nowhere:env' can't be imported: No module named 'nowhere'"),
    ("quickstart", "--env=json:dumps", "environment 'json:dumps' can't be made: TypeError: dumps() missing 1"),
    ("quickstart", "--mesh=data=3", "data=3"),
    ("quickstart", "--workdir=run", "choose another folder"),
    ("evaluate", "--workdir=none", "holds no run"),
    ("evaluate", "--workdir=run", "run is a run of self_verify, whose own result.json says how it did"),
    ("evaluate", "--workdir=old", "names no recipe, so it was written by an earlier version: choose another folder"),
    ("plots", "--workdir=run,spoiled", "run,spoiled is no folder: give that of one run"),
    ("plots", "--workdir=spoiled", "metrics.jsonl can't be read (No such file or directory)"),
    ("plots", "--workdir=run --format=gif", "--format=gif is unknown; choose from png, svg"),
    ("view", "--workdir=none", "none holds no run: run.json is missing; give the folder of one"),
    ("view", "--workdir=spoiled", "has no 'settings': restore it, or choose another folder"),
    ("export", "--workdir=none --out=out", "holds no run"),
    ("export", "--workdir=run --out=out", "has no checkpoint yet: continue the run"),
    ("replay", "", "name the work directory of a cluster's run"),
    ("replay", "--run=run", "run is not the run of a cluster"),
    ("finetune", "--method=sft --model=x --data=none.jsonl", "none.jsonl is no file: give the file"),
    ("finetune", "--method=sft --model=mute --data=answer.jsonl --workdir=run --noresume", "answer.jsonl"),
    ("score", "--tasks=answer.jsonl --answers=none.jsonl --out=out", "--answers=none.jsonl is no file; give"),
    ("score", "--tasks=answer.jsonl --answers=x --out=out --domain=chess", "--domain=chess is unknown; choose from"),
    ("score", "--tasks=answer.jsonl --answers=x --out=no/out", "there is no folder no; make it"),
    ("cluster", "--reward_workers=any", "'any' should be DOMAIN=COUNT, such as any=2"),
    ("cluster", "--trainer_workers=2", "give --mesh=data=2"),
    ("cluster", "--schedule=partial", "--schedule=partial needs --segment_tokens"),
    ("cluster", "--model=mute --tasks=answer.jsonl --workdir=run --noresume", "put a chat_template.jinja there"),
    ("compare", "--arms=chess", "'chess' is no arm of this study; they are"),
    ("environments", "--environments=chess", "environment 'chess' is unknown; choose from lookup"),
    ("simulate", "--schedules=sync,slow", "--schedules: 'slow' is none of sync, one_step_off, async, partial"),
    ("simulate", "--workers=many", "many"),
    ("soak", "--experiment=cluster --signal=TERM", "--signal=TERM is not supported for a cluster"),
    ("chat", "--model=", "--model is missing"),
    ("chat", "--model=/nowhere/at/all", "/nowhere/at/all"),
    ("chat", "--model=mute", "put a chat_template.jinja there"),
    ("chat", "--model=x --temperature=0", "--temperature=0.0 must be greater than 0; greedy is --top_k=1"),
    ("chat", "--model=x --top_k=65", "--top_k=65 must be from 1 to 64"),
    ("chat", "--model=x --top_p=0", "--top_p=0.0 must be greater than 0"),
    ("compare", "--check=nowhere", "--check=nowhere: nowhere/credit.jsonl has no run of broadcast with seed 0"),
    ("family", "--algorithms=grp", "'grp' is unknown; choose from flow_grpo,"),
    ("family", "--rewards=1,0", "--rewards has 2 entries and --turns 4"),
    ("family", "--rewards=a,b,c,d", "--rewards=a,b,c,d must be a comma-separated list of floats"),
    ("family", "--turns=0,1,1,1", "every trajectory needs at least one turn"),
    ("plan", "--memory=80", "--memory=80 must be a number above 0 with its unit: 80GiB, 24GB, 512MiB"),
    ("plan", "--compile_top=0 --algorithm=ppo", "can't be planned here; choose one without a critic or pairs"),
    ("plan", "--compile_top=0 --model=nowhere", "--model=nowhere is neither a folder"),
    ("benchmarks.decode", "--rows=4 --tokens=2,2", "--rows has 1 entries and --tokens 2: give one of each a block"),
    ("benchmarks.decode", "--model=/nowhere", "/nowhere"),
    ("benchmarks.packing", "--sizes=abc", "--sizes=abc must be a comma-separated list of positive integers"),
    ("benchmarks.answers", "--pairs=none.txt", "--pairs=none.txt is no file"),
    ("benchmarks.loading", "--width=300", "--width=300 must be a multiple of 256"),
    ("benchmarks.update", "--models=huge", "--models=huge has 'huge'; choose from prototype, small, medium, large"),
    ("benchmarks.iteration", "--parts=whole", "choose from iteration, scaling, prefill"),
    ("benchmarks.peers", "--cases=tennis", "--cases=tennis has 'tennis'; choose from single, single_kl, three_turns,"),
    ("benchmarks.peers", "--systems=flowgrpo,verl", "has 'verl'; choose from flowgrpo, trl, tunix, generate, vllm"),
    ("benchmarks.peers", "--pythons=tunix", "--pythons=tunix must be NAME=PATH with one of flowgrpo, trl, tunix,"),
    ("benchmarks.peers", "--pythons=vllm=/nowhere", "--pythons=vllm=/nowhere: /nowhere is not an executable file"),
    ("benchmarks.peers", "--systems=vllm --pythons=vllm=/bin/false", "vllm needs vllm, which /bin/false lacks"),
    ("benchmarks.peers", "--systems=flowgrpo --cases=", "--cases= names no case"),
    ("benchmarks.real", "--parts=sleep", "--parts=sleep has 'sleep'; choose from decode, update, step, profile"),
    ("benchmarks.real", "--model=/nowhere --systems=flowgrpo", "/nowhere"),
    (
        "benchmarks.real",
        "--systems=trl --pythons=trl=/bin/false",
        "trl needs torch and trl and datasets, which /bin/false",
    ),
    ("benchmarks.exactness", "--models=small", "--models=small has random weights: give real ones, or --parts=ratio"),
]


@pytest.mark.parametrize(("module", "given", "said"), BAD_INPUT)
def test_bad_input_is_one_sentence_and_leaves_everything_as_it_is(command, world, monkeypatch, module, given, said):
    monkeypatch.setenv("PYTHONPATH", str(EXPERIMENTS.parent))
    before = contents(world)
    done = command(module, *shlex.split(given), check=False, cwd=world)
    check_refused(done, said)
    told = [line for line in done.stderr.splitlines() if ": asking " not in line]
    assert len(told) == 1
    assert contents(world) == before


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        ("agentflow", "--turns=0", "--turns=0 must be a whole number of at least 1"),
        ("agentflow", "--qeries=4", "--qeries is no flag; did you mean --queries? (--help lists them)"),
        ("agentflow", "--lr=1", "--lr is no flag; did you mean --lora_rank or --learning_rate?"),
        ("plots", "--workdir=a --workdir=b", "--workdir is given twice, with a and with b: give it once"),
        ("plots", "--workdir=a --format=png --format=svg", "--format is given twice, with png and with svg"),
        ("quickstart", "--seed=1 --updates=3 --seed 2", "--seed is given twice, with 1 and with 2"),
        ("quickstart", "--resume --noresume", "--resume is given twice, with true and with false"),
        ("quickstart", "--help --env=chess", "environment 'chess' is unknown; choose from lookup,"),
        ("quickstart", "run", "'run' is not a flag: settings are given as --name=value"),
        ("export", "--workdir=x", "--out must be given (The folder to write; a model in it is replaced)"),
        ("benchmarks.iteration", "--width=8", "width"),
    ],
)
def test_flags_that_cannot_be_read_end_with_status_2(command, module, given, said):
    check_refused(command(module, *shlex.split(given), check=False), said, status=2)


# Flags in sentences ------------------------------------------------------------------------------------------

OPENERS = {"evaluate", "export", "replay", "view"}  # say what is wrong with a run, in the flags it was started with
PARTS_ONLY = {  # commands that take nothing from a module that would say its sentences
    "flowgrpo.recipes.agent": {"train_agent", "train_env"},
    "flowgrpo.recipes.agent_config": {"self_verify", "train_agent", "train_env"},
    "flowgrpo.recipes.agent_warm_start": {"train_agent", "train_env"},
    "flowgrpo.training.language_model": {"quickstart"},
    "flowgrpo.training.settings": {"finetune", "quickstart", "self_verify"},
    "flowgrpo.training.planner": {"finetune", "quickstart"},
    "flowgrpo.training.warm_start": {"finetune", "train_env"},
    "flowgrpo.planning.targets": {"benchmarks.update"},
    "flowgrpo.data.task_files": {"finetune", "simulate", "benchmarks.agents", "benchmarks.cluster"},
}
# They say what is wrong with the settings of a run.
RUNS = ("flowgrpo.recipes.", "flowgrpo.publish.", "flowgrpo.training.", "flowgrpo.distributed.")
RUNS += ("flowgrpo.report.sinks", "experiments.studies.")
RAISES = ("BadInput", "ValidationError", "exit", "unreadable")


def path_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def texts(node: ast.AST) -> list[str]:
    return [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


@cache
def read(module: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The modules that one imports, the flags that it defines, and those that its errors name."""
    imports, defined, named = set(), set(), set()
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.ImportFrom):
            imports |= {name for name in imported_modules(module, node) if path_of(name).exists()}
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            defined |= {text for text in texts(node) if text.isidentifier()} if name.startswith("DEFINE_") else set()
            said = " ".join(texts(node)) if name in RAISES else ""
            named |= set(re.findall(r"--([a-z]\w*)", said))
    return frozenset(imports), frozenset(defined), frozenset(named)


def reached(module: str) -> set[str]:
    """A module with all that it imports."""
    found, new = set(), {module}
    while new:
        found |= new
        new = {name for each in new for name in read(each)[0]} - found
    return found


def settings(folder: str, command: str) -> set[str]:
    """The flags that follow from the Config that a command imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / folder / f"{command}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and "Config" in [alias.name for alias in node.names]:
            declared = setting_infos(import_module(str(node.module)).Config)
            found |= {name for name, one in declared.items() if one.heading is not None}
    if command == "train":  # which has those of the recipe that it is given
        found = found.union(*(setting_infos(find_config(name)) for name in recipe_names()))
    return found


def test_errors_name_only_flags_of_their_command():
    for folder in ("experiments", "experiments/benchmarks"):
        for command in commands(ROOT / folder):
            modules = reached(f"{folder}/{command}".replace("/", "."))
            flags = (
                {flag for module in modules for flag in read(module)[1]} | {"help", "name"} | settings(folder, command)
            )
            flags |= {"merge"}  # of llama-gguf-split
            flags |= {f"no{flag}" for flag in flags}
            trains = bool(settings(folder, command))
            for module in modules:
                own = f"{folder}.{command}".replace("/", ".").removeprefix("experiments.")
                if own in OPENERS | PARTS_ONLY.get(module, set()) or (module.startswith(RUNS) and not trains):
                    continue
                assert read(module)[2] <= flags, (own, module)
