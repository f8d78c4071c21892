"""Worlds of text that a policy plays in, from well-known collections: one interface, named by ``env:`` datasets."""
