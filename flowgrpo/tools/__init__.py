"""What agents call: functions that return a `Tool`, and the set that runs them."""
