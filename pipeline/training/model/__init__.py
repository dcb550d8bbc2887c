"""The model and its optimizers: built, frozen, compiled, and described by the names of parameters."""
