"""The system on several processes and hosts: a master, workers that roll out, judge and train, over Ray.

`messages` says what flows between them, `workers` what each does, `master` who does what when, `worker_pool` how they
are called and replaced, `ray_backend` how they are started: the one module that imports Ray.

Modules:

    cluster_state  Keep what is under way in a cluster as values that never change in place
    eval_shares    Deal an examination out in shares of tasks, and collect the judged stretches
    event_log      Log of a cluster's events in the order in which the master heard of them, appended line by line (S2)
    kill_series    Kill the processes of a cluster at random moments, each kind in turn, the master included (S1, S4)
    master         The master: news of the workers flow in, calls to workers flow out, as the schedule says
    messages       Messages between master and workers: orders to the workers, stretches of trajectories back from them
    ray_backend    Workers in processes of their own, by Ray: started, called, killed. The only module that imports it
    schedule       Schedules that answer each event of a run with commands to workers. Pure
    simulation     A cluster in virtual time
    table          Table of what a cluster is doing
    worker_pool    Start, call, ask and replace the workers of a master
    workers        Workers of each kind: ordinary objects, which a backend puts into processes of their own
"""

from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.schedule import (
    Command,
    Event,
    Plan,
    advance,
    asynchronous,
    one_step_off,
    partial_rollouts,
    synchronous,
)
from flowgrpo.distributed.simulation import Costs, simulate
