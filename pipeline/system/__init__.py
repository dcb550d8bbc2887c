"""This process and its operating system: signals, memory allocator, imports, environment."""
