"""Pure environments: each a module with a constructor that returns an `Env`."""
