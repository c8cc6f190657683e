"""Tools for agents to call: functions that return a `Tool`, and the set that runs them."""
