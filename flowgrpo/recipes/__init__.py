"""Recipes: each makes one kind of run by its `Config`, `open` and `train`; and what they share.

Modules:

    agent               The recipe of a run on the agent system: its planner is trained in the flow, with real tools
    agent_config        Settings of a run on the agent system
    agent_warm_start    What a pretrained planner imitates before reinforcement, and the check of its form
    cluster             The recipe of a cluster that trains the agent system
    cluster_config      Settings of a cluster that trains the agent system, and the schedule that they mean
    cluster_trainer     The trainer of a cluster
    compare             Run the arms of a study over seeds
    device_checks/      Checks of the device that is there: are its numbers right, and how fast are they
    dry_runs            Tables of what the programs of a run take of a device; no weight is ever made
    example_agent       An agent written with the SDK of OpenAI, which knows nothing of training
    export              Read a run again: `read_config` its settings, `read_planner` its checkpoints
    finetune            The recipe of learning from a file of conversations
    finetune_config     Settings of learning from a file of conversations
    hosted              Parts of a run on a host environment, which training and examinations share
    hosted_config       Settings that all runs on a host environment share
    hosted_training     Train on a host environment: `HostedWork` has the stages of such a run for a `Session`
    hub                 Put an exported folder on the Hugging Face Hub
    model_card          The README.md beside exported weights: a model card in the form that the Hugging Face Hub reads
    names               Names that settings and flags offer
    offline_start       Make the model that the offline agent run begins with
    offline_tasks       Tasks of four domains that need real tools, made here without a file
    pages               Write a page of what a run recorded in `trajectories/`
    own_agent           The recipe of a run on an agent of your own, a program or a function, which is trained as it is
    own_agent_config    Settings of a run on an agent of your own
    own_env             The recipe of a run on an environment of your own: TRL-style, gymnasium, textarena, or OpenEnv
    own_env_config      Settings of a run on an environment of your own
    panel               Fixed sets of test tasks, one of each environment and difficulty
    planner             The planner of a hosted run
    pure                The recipe of a run on a pure environment
    pure_config         Settings of a run on a pure environment
    registry            Names of members for flags
    self_verify         The recipe of self-verification
    self_verify_config  Settings of a run on self-verification
    self_verify_tasks   A small model that can do two things, neither of them well: answer questions, and judge answers
    studies             The studies that ship
    study_arms          One arm of a study: what differs from the others flows in
    study_pages         Show what came of a study
    task_choice         Which tasks a hosted run trains on
    task_sets/          Task sets that are made here without a file, small enough for a pretrained model on a CPU
"""

import lazy_loader

# Loaded when they are first used, since each brings with it all that its kind of run needs.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=(
        "agent",
        "cluster",
        "compare",
        "export",
        "finetune",
        "hub",
        "offline_start",
        "own_agent",
        "own_env",
        "panel",
        "pure",
        "registry",
        "self_verify",
        "studies",
        "study_pages",
    ),
)
