"""From a YAML file to a frozen, validated Experiment, with every problem reported at once."""
