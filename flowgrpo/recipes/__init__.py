"""Recipes: each makes one kind of run, by its `Config`, `preset`, `build` and `RECIPE`; and what they share.

Modules:

    agent               Recipe: the agent system, whose planner is trained in the flow, with real tools
    agent_config        Settings of a run on the agent system
    agent_warm_start    The warm start of a pretrained planner, and the check of its format
    cluster             Recipe: a cluster that trains the agent system
    cluster_config      Settings of a cluster, and its schedule
    cluster_trainer     The trainer of a cluster
    compare             Compare algorithms over seeds, which all start from the same planners
    dry_runs            Memory and time that the programs of a run need, without weights
    example_agent       An example agent, written with the SDK of OpenAI
    finetune            Recipe: learning from a file of conversations (SFT, DPO)
    finetune_config     Settings of learning from a file of conversations
    offline_start       The model with which the offline agent run starts
    offline_tasks       Tasks of four domains that need real tools, generated
    own_agent           Recipe: an agent of your own, a program or a function
    own_agent_config    Settings of a run on an agent of your own
    own_env             Recipe: an environment of your own: TRL-style, gymnasium, textarena, or OpenEnv
    own_env_config      Settings of a run on an environment of your own
    panel               Fixed sets of test tasks, one for each environment and difficulty
    pure                Recipe: a pure environment
    pure_config         Settings of a run on a pure environment
    planner_reader      How the planner of a run is read from its folder
    recipe              What a recipe is: `Recipe`, the `Objects` that it takes, and how one is found
    registry            Constructors by name
    self_verify         Recipe: self-verification
    self_verify_config  Settings of a run on self-verification
    self_verify_tasks   A small model that answers questions and judges answers, neither of them well
    study               A study, and one arm of it, as functions of one seed
    study_tables        Results of a study: a table with confidence intervals, a plot, and a page
    word_planner        The small planner of a pure environment: its shape, and how it is read
    task_sets/          Generated task sets, small enough for a pretrained model on a CPU
"""

import lazy_loader

# Imported on first use, since each imports everything that its kind of run needs.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=(
        "agent",
        "cluster",
        "compare",
        "finetune",
        "offline_start",
        "own_agent",
        "own_env",
        "panel",
        "pure",
        "recipe",
        "registry",
        "self_verify",
        "study",
        "study_tables",
    ),
)
