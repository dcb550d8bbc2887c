"""What is measured and reported while a training runs. Start at `meter`."""
