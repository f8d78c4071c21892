"""Everything that a run holds, as its documents name it: whether it is whole, and what of it is garbage."""
