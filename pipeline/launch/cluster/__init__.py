"""A Ray cluster: connection, nodes, placement, capacity, and the project's code on it."""
