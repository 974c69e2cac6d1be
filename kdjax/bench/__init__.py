"""Time of a decode step on the devices at hand, with random weights that are made there."""
