"""Systems that `benchmarks.peers` and `benchmarks.real` compare, each a process that makes a step on request.

    race            start the processes, let them make steps in turn, and stop them
    protocol        lines that a process reads and writes
    workload        cases, words and prompts; `real_workload`: those on real weights
    ours            this framework; `real_ours`: on real weights
    trl_trainer     GRPOTrainer of TRL
    tunix_learner   GRPOLearner and sampler of tunix
    torch_generate  generate of transformers
    vllm_engine     vLLM's engine on CPUs
    real_torch, real_trl, real_vllm, real_llama_cpp     the same, and llama.cpp, on real weights

All but `race`, `ours` and `real_ours` run without flowgrpo installed: besides the library that they drive they import
only the standard library. No module has the name of such a library.
"""
