"""Training on several processes and hosts over Ray: a master, and workers that roll out, judge and train.

`messages` defines what they exchange, `workers` what each kind does, `master` runs the schedule, `worker_pool` calls
and replaces workers, and `ray_backend` starts them.

Modules:

    cluster_state  State of a cluster as values that never change in place: groups, workers, the replay buffer
    eval_shares    Distribute an evaluation over rollout workers in shards of tasks
    event_log      Log of a cluster's events in the order in which the master received them (S2)
    kill_series    Kill the processes of a cluster at random moments, the master included (S1, S4)
    master         The master: it turns news of the workers into events, and the schedule's commands into calls
    messages       Messages between master and workers: rollout jobs, and slices of trajectories in return
    ray_backend    Workers in processes of their own, by Ray. The only module that imports it
    schedule       Schedules that answer each event of a run with commands to workers. Pure
    simulation     Simulation of a cluster in virtual time
    table          Status table of a cluster
    worker_pool    Start, call and replace the workers of a master
    workers        Rollout and reward workers
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
