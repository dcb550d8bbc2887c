"""The result of a training: its weights, an example, the exported model, and what ranks report."""
