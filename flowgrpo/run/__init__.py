"""One run in its folder: settings, session, checkpoints, signals.

Modules:

    checkpoints  The whole run as one tree in a folder, by Orbax, so that a run that was killed goes on bit for bit (S1)
    config       Settings of a run: a frozen dataclass in which each is declared once, with its type, default
    kill_series  Kill runs at random moments of a timeline, and compare what came of it, bit for bit (S1)
    next_steps   Closing message of a run: what it wrote, and what can be done with it, one command a line
    run_dir      The folder of a run: what it was started with, checked before it goes on, and one process at a time
    run_files    Names of all that a run writes in its folder, so that nothing else there is ever removed or overwritten
    session      One run in its folder: warm start, training, validations, checkpoints, the end; whatever is trained
    signals      Ctrl-C and SIGTERM: what runs ends at once, but never between two halves of what belongs together
    time_budget  Time that a command may take, on a machine that is lent for some hours
    tree_io      Trees as flat leaves that files can hold, and back again, bit for bit
    warm_start   Imitation before reinforcement

Names are listed in `__init__.pyi`, and are loaded when they are first used: settings and progress need no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
