"""The learner: state, update, warm start, checkpoints."""
