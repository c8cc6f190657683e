"""Systems that `benchmarks.peers` compares, each a process that makes one step whenever it is asked for one.

    race            start the processes, let them take turns, and stop them
    protocol        what a process reads and writes
    workload        cases, words and prompts
    ours            this framework
    trl_trainer     GRPOTrainer of TRL
    tunix_learner   GRPOLearner and sampler of tunix
    torch_generate  generate of transformers
    vllm_engine     vLLM's engine on CPUs

All but `race` and `ours` run where flowgrpo is not installed: beside the library that they drive they import the
standard library alone. No module has the name of such a library.
"""
