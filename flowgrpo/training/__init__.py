"""Training: the iteration, the session with its loop, and what a run needs around them.

Modules:

    checkpoints      Checkpoints of a run: one tree in a folder, written by Orbax, to resume bit for bit (S1)
    config           Settings of a run: a Config of sections, in which each is declared once, with type and default
    config_files     Settings in files and on command lines: YAML or JSON by section, and SECTION.NAME=VALUE
    curriculum       Which tasks a hosted run trains on
    hosted_training  Training on a host environment
    iteration        One update in three calls, `Iteration`: rollout, advantages, update
    kill_series      Kill runs at random moments, and compare them with an undisturbed run, bit for bit (S1)
    language_model   The parts of a run on a host environment, its rollouts and evaluations
    names            Choices of settings and flags
    next_steps       Closing message of a run: what it wrote, and what can be done with it, one command a line
    planner          The planner of a hosted run: what is trained, and what the engine decodes with
    pure_env         Pure environments: the stages of an update whose rollout is compiled, too
    run_dir          The folder of a run: what it was started with, checked before it resumes, and one process at a time
    run_files        Names of all files that a run writes, so that no other file there is ever deleted or overwritten
    session          One run in its folder: warm start, the training loop, test
    settings         Sections of every run on a host environment
    signals          Ctrl-C and SIGTERM, which never part what belongs together
    stages           The stages of an update after its rollout, as pure functions
    time_budget      Time that a command may take, on a machine that is lent for some hours
    tree_io          Trees as flat leaves that files can store, and back again, bit for bit
    warm_start       Imitation before reinforcement

Names are listed in `__init__.pyi` and loaded on first use: settings and progress need no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
