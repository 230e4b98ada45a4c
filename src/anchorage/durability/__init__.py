"""The durability lab: what a crash leaves of a save, by recipe, by filesystem, and of this package's own writers."""
