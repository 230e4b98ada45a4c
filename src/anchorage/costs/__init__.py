"""What the choices of a capture cost: each measured in fresh processes, round after round, and put into words."""
