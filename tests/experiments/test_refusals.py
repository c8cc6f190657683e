"""Every command starts and knows its flags; what it can't do is one sentence and a status."""

import pytest

from experiments.listing import commands
from tests.experiments.conftest import EXPERIMENTS, check_refused

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("folder", ["", "benchmarks/"])
def test_every_command_has_a_page_of_help(command, folder):
    for name in commands(EXPERIMENTS / folder):
        page = command(f"{folder}{name}".replace("/", "."), "--help").stdout
        assert "\n\nEvery command:\n  --compilation_cache=TEXT\n" in page, name


BAD_INPUT = [
    ("agentflow", "--tools=calculator,browser", "'browser' is none of calculator, python, search"),
    ("agentflow", "--domains=chess", "'chess' has no offline tasks"),
    ("agentflow", "--tasks=nowhere.jsonl", "nowhere.jsonl"),
    ("agentflow", "--corpus=nowhere.txt", "nowhere.txt"),
    ("agentflow", "--executor=loud", "loud"),
    ("agentflow", "--mcp=no-such-command-anywhere", "no-such-command-anywhere"),
    ("agentflow", "--prompts=curriculum", "--prompts=curriculum needs --difficulty"),
    ("agentflow", "--prompts=curriculum --difficulty=level", "field 'level' is missing"),
    ("self_verify", "--model=nowhere", "model folder nowhere does not exist"),
    ("quickstart", "--workdir={tmp}/file/run --updates=4", "can't be made"),
    ("evaluate", "--workdir={tmp}/none", "holds no run"),
    ("plots", "--workdir={tmp}/none", "metrics.jsonl can't be read (No such file or directory)"),
    ("export", "--workdir={tmp}/none --out={tmp}/out", "holds no run"),
    ("finetune", "--method=sft --model=x --data={tmp}/none.jsonl", "none.jsonl is no file: give the path"),
    ("chat", "--model=", "--model is missing"),
    ("chat", "--model=/nowhere/at/all", "/nowhere/at/all"),
    ("chat", "--model=x --temperature=0", "--temperature=0.0 must be greater than 0; greedy is --top_k=1"),
    ("chat", "--model=x --top_k=65", "--top_k=65 must be from 1 to 64"),
    ("chat", "--model=x --top_p=0", "--top_p=0.0 must be greater than 0"),
    ("chat", "--model=x --max_tokens=0", "--max_tokens=0 must be at least 1"),
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
    ("benchmarks.iteration", "--parts=whole", "choose from iteration, scaling, prefill, seeds, trl"),
]


@pytest.mark.parametrize(("module", "given", "said"), BAD_INPUT)
def test_bad_input_is_one_sentence_and_no_run(command, tmp_path, monkeypatch, module, given, said):
    monkeypatch.setenv("PYTHONPATH", str(EXPERIMENTS.parent))
    (tmp_path / "file").touch()
    check_refused(command(module, *given.format(tmp=tmp_path).split(), check=False, cwd=tmp_path), said)
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        ("agentflow", "--turns=0", "flag --turns=0: 0 is not a positive integer"),
        ("self_verify", "--samples=1", "flag --samples=1: 1 is not integer >= 2"),
        ("quickstart", "--env=chess", "lookup"),
        ("benchmarks.iteration", "--width=8", "width"),
    ],
)
def test_flags_that_cannot_be_read_end_with_status_2(command, module, given, said):
    check_refused(command(module, given, check=False), said, status=2)
