"""Trajectories of one run or many as one table: the columns that people read, and questions in SQL."""
