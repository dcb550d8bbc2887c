"""What the ranks of a training share: collectives, seeds, comparisons, and the watch over hangs."""
