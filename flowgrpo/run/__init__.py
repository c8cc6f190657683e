"""One run in its folder: settings, session, checkpoints, signals.

Modules:

    checkpoints  Checkpoints of a run: one tree in a folder, written by Orbax, to resume bit for bit (S1)
    config       Settings of a run: a frozen dataclass in which each is declared once, with its type, default
    kill_series  Kill runs at random moments, and compare them with an undisturbed run, bit for bit (S1)
    next_steps   Closing message of a run: what it wrote, and what can be done with it, one command a line
    run_dir      The folder of a run: what it was started with, checked before it resumes, and one process at a time
    run_files    Names of all files that a run writes, so that no other file there is ever deleted or overwritten
    session      One run in its folder: warm start, training with validations and checkpoints, test; the training loop
    signals      Ctrl-C and SIGTERM: they end the process soon, but never between two halves of what belongs together
    time_budget  Time that a command may take, on a machine that is lent for some hours
    tree_io      Trees as flat leaves that files can store, and back again, bit for bit
    warm_start   Imitation before reinforcement

Names are listed in `__init__.pyi` and loaded on first use: settings and progress need no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
