"""Processes that run code of the user's: started, called with hard limits, killed with all they started."""
