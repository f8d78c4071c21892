"""Prefect tasks: one hop of the data path each; small references in, small references out."""
