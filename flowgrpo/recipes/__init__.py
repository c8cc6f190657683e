"""Recipes: each makes one kind of run, by its `Config`, `preset`, `build` and `train`; and what they share.

Modules:

    agent               Recipe: the agent system, whose planner is trained in the flow, with real tools
    agent_config        Settings of a run on the agent system
    agent_warm_start    The warm start of a pretrained planner, and the check of its format
    cluster             Recipe: a cluster that trains the agent system
    cluster_config      Settings of a cluster, and its schedule
    cluster_trainer     The trainer of a cluster
    compare             Run the arms of a study over seeds
    device_checks/      Checks of the device: are its numbers right, and how fast is it
    dry_runs            Memory and time that the programs of a run need, without weights
    example_agent       An example agent, written with the SDK of OpenAI
    export              Read a run's settings and planner; write the planner as a model
    finetune            Recipe: learning from a file of conversations (SFT, DPO)
    finetune_config     Settings of learning from a file of conversations
    hosted              The parts of a run on a host environment, its rollouts and evaluations
    hosted_config       Settings of every run on a host environment
    hosted_training     Training on a host environment
    hub                 Upload an exported folder to the Hugging Face Hub
    model_card          The model card of exported weights
    names               Choices of settings and flags
    offline_start       The model with which the offline agent run starts
    offline_tasks       Tasks of four domains that need real tools, generated
    own_agent           Recipe: an agent of your own, a program or a function
    own_agent_config    Settings of a run on an agent of your own
    own_env             Recipe: an environment of your own: TRL-style, gymnasium, textarena, or OpenEnv
    own_env_config      Settings of a run on an environment of your own
    pages               The page of the trajectories that a run recorded
    panel               Fixed sets of test tasks, one for each environment and difficulty
    planner             The planner of a hosted run: what is trained, and what the engine decodes with
    pure                Recipe: a pure environment
    pure_config         Settings of a run on a pure environment
    registry            Constructors by name
    self_verify         Recipe: self-verification
    self_verify_config  Settings of a run on self-verification
    self_verify_tasks   A small model that answers questions and judges answers, neither of them well
    studies             The studies that ship
    study_arms          One arm of a study
    study_pages         Results of a study: tables, plots, pages
    task_choice         Which tasks a hosted run trains on
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
