"""The agent system as a host environment: planner, executor, verifier, generator and memory around injected effects."""
