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
"""

from flowgrpo.run.checkpoints import Checkpoints, params_sha256
from flowgrpo.run.config import RunConfig, TrainingConfig, setting
from flowgrpo.run.run_dir import read_run, run_folder
from flowgrpo.run.session import Session, TestedWork, Work, run_session
from flowgrpo.run.time_budget import OutOfTime, TimeBudget, time_budget
from flowgrpo.run.warm_start import WarmStart
